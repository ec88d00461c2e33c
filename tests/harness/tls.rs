//! TLS for both sides, with the certificates under `tests/data/tls`.

use std::net::SocketAddr;
use std::sync::Arc;

use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::{ClientConfig, RootCertStore, ServerConfig};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinHandle;
use tokio_rustls::client::TlsStream;
use tokio_rustls::{TlsAcceptor, TlsConnector};

use super::files;

pub fn pem(name: &str) -> std::path::PathBuf {
    files::path("data/tls").join(name)
}

fn certificates(name: &str) -> Vec<CertificateDer<'static>> {
    CertificateDer::pem_file_iter(pem(name)).expect("a PEM file").collect::<Result<_, _>>().expect("certificates")
}

fn key(name: &str) -> PrivateKeyDer<'static> {
    PrivateKeyDer::from_pem_file(pem(name)).expect("a key")
}

fn roots() -> RootCertStore {
    let mut roots = RootCertStore::empty();
    for certificate in certificates("ca.pem") {
        roots.add(certificate).expect("a root");
    }
    roots
}

fn provider() -> Arc<rustls::crypto::CryptoProvider> {
    Arc::new(rustls::crypto::ring::default_provider())
}

/// Connects as a client that trusts the tests' authority.
///
/// # Errors
/// Where the handshake fails.
pub async fn connect(to: SocketAddr, alpn: &[&[u8]], with_certificate: bool) -> std::io::Result<TlsStream<TcpStream>> {
    let builder = ClientConfig::builder_with_provider(provider())
        .with_safe_default_protocol_versions()
        .expect("protocol versions")
        .with_root_certificates(roots());
    let mut config = if with_certificate {
        builder.with_client_auth_cert(certificates("client.pem"), key("client.key")).expect("a client certificate")
    } else {
        builder.with_no_client_auth()
    };
    config.alpn_protocols = alpn.iter().map(|p| p.to_vec()).collect();
    let stream = TcpStream::connect(to).await?;
    let name = ServerName::try_from("localhost").expect("a name");
    TlsConnector::from(Arc::new(config)).connect(name, stream).await
}

/// A TLS front before a plain replica: takes `alpn`, may ask for a client certificate, passes bytes on.
pub struct TlsFront {
    pub address: SocketAddr,
    /// Server names that clients asked for.
    pub names: Arc<parking_lot::Mutex<Vec<String>>>,
    task: JoinHandle<()>,
}

impl Drop for TlsFront {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl TlsFront {
    pub async fn before(behind: SocketAddr, certificate: &str, ask_client: bool) -> TlsFront {
        let address = super::ports::free();
        let listener = TcpListener::bind(address).await.expect("a listener");
        let builder = ServerConfig::builder_with_provider(provider())
            .with_safe_default_protocol_versions()
            .expect("protocol versions");
        let builder = if ask_client {
            let verifier = rustls::server::WebPkiClientVerifier::builder_with_provider(Arc::new(roots()), provider())
                .build()
                .expect("a verifier");
            builder.with_client_cert_verifier(verifier)
        } else {
            builder.with_no_client_auth()
        };
        let config = builder
            .with_single_cert(certificates(&format!("{certificate}.pem")), key(&format!("{certificate}.key")))
            .expect("a certificate");
        let acceptor = TlsAcceptor::from(Arc::new(config));
        let names = Arc::new(parking_lot::Mutex::new(Vec::new()));
        let kept = Arc::clone(&names);
        let task = tokio::spawn(async move {
            loop {
                let Ok((stream, _)) = listener.accept().await else { continue };
                let acceptor = acceptor.clone();
                let kept = Arc::clone(&kept);
                tokio::spawn(async move {
                    let Ok(mut tls) = acceptor.accept(stream).await else { return };
                    if let Some(name) = tls.get_ref().1.server_name() {
                        kept.lock().push(name.to_owned());
                    }
                    let Ok(mut plain) = TcpStream::connect(behind).await else { return };
                    let _ = tokio::io::copy_bidirectional(&mut tls, &mut plain).await;
                });
            }
        });
        TlsFront { address, names, task }
    }
}
