//! What befalls replicas in the middle of a run.

use std::sync::Arc;
use std::time::Duration;

use super::{Event, Fleet, replica_specs, settings};
use crate::balance::{Gate, Outcome};
use crate::sim::fleet::faults::Trouble;

/// A dead replica is found out after this: a few probes, or as many failed connections.
const DETECTION: Duration = Duration::from_secs(4);
/// Slow start of a replica that came back.
const RAMP: Duration = Duration::from_secs(10);

impl Fleet<'_> {
    pub(super) fn fault(&mut self, number: usize, begins: bool) {
        let fault = self.options.faults.faults[number];
        let at = fault.replica;
        let count = |n: &mut u32| if begins { *n += 1 } else { *n -= 1 };
        let length = match fault.trouble {
            Trouble::Death { down } => {
                count(&mut self.nodes[at].down);
                if begins {
                    self.die(at)
                } else {
                    self.come_back(at)
                }
                down
            }
            Trouble::Hang { length } => {
                count(&mut self.nodes[at].hung);
                if !begins {
                    self.move_again(at);
                }
                length
            }
            Trouble::Slow { factor, length } => {
                let node = &mut self.nodes[at];
                if begins {
                    node.slow.push(factor);
                } else if let Some(which) = node.slow.iter().position(|&f| f == factor) {
                    node.slow.remove(which);
                }
                node.engine.set_speed(node.speed / node.slow.iter().product::<f64>());
                length
            }
            Trouble::Refusals { length } => {
                count(&mut self.nodes[at].refusing);
                length
            }
            Trouble::NoMetrics { length } => {
                count(&mut self.nodes[at].unread);
                length
            }
            Trouble::Removed { length } => {
                count(&mut self.removed[at]);
                self.reload();
                length
            }
        };
        if begins {
            self.push(self.now().after(length), Event::FaultEnd(number as u32));
        }
    }

    fn die(&mut self, at: usize) {
        let now = self.now();
        let node = &mut self.nodes[at];
        node.epoch += 1;
        let (epoch, cut) = (node.epoch, node.engine.reset());
        self.push(now.after(DETECTION), Event::Detected { replica: at as u32, epoch });
        for id in cut {
            let i = id as u32;
            let Some(flight) = self.flights[i as usize].as_mut() else { continue };
            if let Some(reservation) = flight.reservation.take() {
                reservation.settle(None, Outcome::UpstreamError);
            }
            flight.replica = usize::MAX;
            // Once a token is out, nobody else can go on with it.
            if self.run.records[i as usize].ttft.is_some() { self.failed(i) } else { self.retry(i, at) }
        }
    }

    fn come_back(&mut self, at: usize) {
        let node = &self.nodes[at];
        if node.down == 0 {
            node.handle.set_gate(Gate::Warming, Duration::ZERO);
            node.handle.set_gate(Gate::Open, RAMP);
        }
    }

    fn move_again(&mut self, at: usize) {
        let node = &self.nodes[at];
        if node.hung > 0 || node.down > 0 {
            return;
        }
        if node.engine.step_end().is_some() {
            let (now, epoch) = (self.now(), node.epoch);
            self.push(now, Event::StepEnd { replica: at as u32, epoch });
        } else {
            self.begin_step(at);
        }
    }

    fn reload(&mut self) {
        let removed: Vec<usize> = (0..self.removed.len()).filter(|&i| self.removed[i] > 0).collect();
        self.balancer.apply(settings(self.options), &replica_specs(self.spec, self.options, &removed));
        for (i, member) in self.spec.members.iter().enumerate() {
            let Some(handle) = self.balancer.replica(&member.spec.id) else { continue };
            if !Arc::ptr_eq(&handle, &self.nodes[i].handle) {
                // Removed, finished, and back: a new acquaintance.
                let gate = if self.nodes[i].down > 0 { Gate::Ill } else { Gate::Open };
                handle.set_gate(gate, Duration::ZERO);
                self.nodes[i].handle = handle;
            }
        }
    }
}
