//! Replicas behind a DNS name: A and AAAA with a configured port, or SRV; asked again when the records' TTL is over.

use std::net::IpAddr;
use std::time::{Duration, Instant};

use hickory_resolver::config::{LookupIpStrategy, NameServerConfigGroup, ResolverConfig};
use hickory_resolver::name_server::TokioConnectionProvider;
use hickory_resolver::{ResolveError, TokioResolver};

use crate::config::{DnsDiscovery, ReplicaReader, ReplicaSpec};

use super::{Feed, Pause, chain};

/// One question's patience; the resolver asks twice within it.
const TIMEOUT: Duration = Duration::from_secs(2);

pub(super) async fn follow(dns: DnsDiscovery, reader: ReplicaReader, feed: Feed) {
    let mut pause = Pause::new();
    let resolver = loop {
        match resolver(&dns) {
            Ok(resolver) => break resolver,
            Err(why) => feed.failed(&why),
        }
        pause.wait().await;
    };
    loop {
        let found =
            if dns.srv { services(&resolver, &dns, &reader).await } else { hosts(&resolver, &dns, &reader).await };
        match found {
            Ok((specs, valid_until)) => {
                pause.reset();
                feed.good(specs);
                let ttl = valid_until.saturating_duration_since(Instant::now());
                tokio::time::sleep(ttl.clamp(dns.ttl_min, dns.ttl_max)).await;
            }
            Err(e) => {
                feed.failed(&chain(&e));
                pause.wait().await;
            }
        }
    }
}

fn resolver(dns: &DnsDiscovery) -> Result<TokioResolver, String> {
    let mut builder = if dns.resolvers.is_empty() {
        TokioResolver::builder_tokio().map_err(|e| format!("the system's resolver configuration: {}", chain(&e)))?
    } else {
        let mut servers = NameServerConfigGroup::new();
        for address in &dns.resolvers {
            servers.merge(NameServerConfigGroup::from_ips_clear(&[address.ip()], address.port(), true));
        }
        let config = ResolverConfig::from_parts(None, Vec::new(), servers);
        TokioResolver::builder_with_config(config, TokioConnectionProvider::default())
    };
    let options = builder.options_mut();
    options.ip_strategy = LookupIpStrategy::Ipv4AndIpv6;
    options.timeout = TIMEOUT;
    options.attempts = 2;
    // Records are asked for when their time is over, not before; a cache in between would only add to it.
    options.cache_size = 0;
    options.try_tcp_on_error = true;
    Ok(builder.build())
}

async fn hosts(
    resolver: &TokioResolver,
    dns: &DnsDiscovery,
    reader: &ReplicaReader,
) -> Result<(Vec<ReplicaSpec>, Instant), ResolveError> {
    let found = resolver.lookup_ip(absolute(&dns.name)).await?;
    let port = dns.port.unwrap_or(80);
    let specs = found.iter().map(|ip| reader.at(id(&ip.to_string(), port).into(), ip.to_string(), port)).collect();
    Ok((specs, found.valid_until()))
}

/// SRV records: each target and port is a replica. A target keeps its name where TLS needs it, else it is resolved by
/// the same name servers. Priorities and weights are not read: load decides.
async fn services(
    resolver: &TokioResolver,
    dns: &DnsDiscovery,
    reader: &ReplicaReader,
) -> Result<(Vec<ReplicaSpec>, Instant), ResolveError> {
    let found = resolver.srv_lookup(absolute(&dns.name)).await?;
    let mut valid_until = found.as_lookup().valid_until();
    let mut specs = Vec::new();
    for service in found.iter() {
        let name = service.target().to_string();
        let name = name.trim_end_matches('.').to_owned();
        let mut host = name.clone();
        if !dns.template.url.https {
            let addresses = resolver.lookup_ip(absolute(&name)).await?;
            valid_until = valid_until.min(addresses.valid_until());
            let first = addresses.iter().min_by_key(IpAddr::is_ipv6);
            host = first.map_or(name.clone(), |ip| ip.to_string());
        }
        specs.push(reader.at(id(&name, service.port()).into(), host, service.port()));
    }
    Ok((specs, valid_until))
}

/// A name with its last dot, so that no search domain is tried first.
fn absolute(name: &str) -> String {
    if name.ends_with('.') || !name.contains('.') { name.to_owned() } else { format!("{name}.") }
}

fn id(host: &str, port: u16) -> String {
    if host.contains(':') { format!("[{host}]:{port}") } else { format!("{host}:{port}") }
}
