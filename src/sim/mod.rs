//! A simulated replica, and a fleet of them on a virtual clock.
