//! TLS: listeners' certificates, reloaded with the configuration; replicas' authorities and client certificates.

use std::path::Path;
use std::sync::Arc;

use anyhow::Context;
use arc_swap::ArcSwap;
use pingora::listeners::tls::TlsSettings;
use pingora::protocols::tls::CaType;
use pingora::utils::tls::{CertKey, WrappedX509};
use pingora::{Error, ErrorType, Result};
use rustls::client::danger::HandshakeSignatureValid;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, UnixTime};
use rustls::server::danger::{ClientCertVerified, ClientCertVerifier};
use rustls::server::{ClientHello, ResolvesServerCert, WebPkiClientVerifier};
use rustls::sign::CertifiedKey;
use rustls::{DigitallySignedStruct, DistinguishedName, RootCertStore, SignatureScheme};

use crate::config::ListenTls;

/// One listener's certificate and client authority, swapped on reload.
#[derive(Debug)]
pub struct ListenerTls {
    current: ArcSwap<Loaded>,
}

#[derive(Debug)]
struct Loaded {
    key: Arc<CertifiedKey>,
    client: Option<Arc<dyn ClientCertVerifier>>,
}

fn provider() -> Arc<rustls::crypto::CryptoProvider> {
    Arc::new(rustls::crypto::ring::default_provider())
}

fn load(spec: &ListenTls) -> anyhow::Result<Loaded> {
    let certs: Vec<CertificateDer<'static>> = CertificateDer::pem_file_iter(&spec.cert)
        .and_then(Iterator::collect)
        .with_context(|| format!("certificate {}", spec.cert.display()))?;
    anyhow::ensure!(!certs.is_empty(), "{} holds no certificate", spec.cert.display());
    let key = PrivateKeyDer::from_pem_file(&spec.key).with_context(|| format!("private key {}", spec.key.display()))?;
    let key = CertifiedKey::from_der(certs, key, &provider())
        .with_context(|| format!("{} and {} do not belong together", spec.cert.display(), spec.key.display()))?;
    let client = match &spec.client_ca {
        None => None,
        Some(path) => {
            let mut roots = RootCertStore::empty();
            for cert in CertificateDer::pem_file_iter(path).with_context(|| format!("client_ca {}", path.display()))? {
                roots.add(cert.with_context(|| format!("client_ca {}", path.display()))?)?;
            }
            let verifier = WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider())
                .build()
                .with_context(|| format!("client_ca {}", path.display()))?;
            Some(verifier)
        }
    };
    Ok(Loaded { key: Arc::new(key), client })
}

impl ListenerTls {
    /// Reads the files.
    ///
    /// # Errors
    /// A file that cannot be read, or a key that is not the certificate's.
    pub fn load(spec: &ListenTls) -> anyhow::Result<Arc<ListenerTls>> {
        Ok(Arc::new(ListenerTls { current: ArcSwap::from_pointee(load(spec)?) }))
    }

    /// Reads the files again; new connections get what they hold now.
    ///
    /// # Errors
    /// As [`ListenerTls::load`]; what was loaded stays then.
    pub fn reload(&self, spec: &ListenTls) -> anyhow::Result<()> {
        self.current.store(Arc::new(load(spec)?));
        Ok(())
    }

    /// Pingora's settings for a listener, HTTP/2 offered.
    ///
    /// # Errors
    /// As Pingora gives them.
    pub fn settings(self: &Arc<Self>) -> Result<TlsSettings> {
        // The paths are not read where there is a resolver.
        let mut settings = TlsSettings::intermediate("", "")?;
        settings.set_cert_resolver(self.clone());
        if self.current.load().client.is_some() {
            settings.set_client_cert_verifier(self.clone());
        }
        settings.enable_h2();
        Ok(settings)
    }
}

impl ResolvesServerCert for ListenerTls {
    fn resolve(&self, _hello: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        Some(self.current.load().key.clone())
    }
}

impl ClientCertVerifier for ListenerTls {
    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        // No hints: the authorities may change under a running listener.
        &[]
    }

    fn verify_client_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        now: UnixTime,
    ) -> Result<ClientCertVerified, rustls::Error> {
        match &self.current.load().client {
            Some(client) => client.verify_client_cert(end_entity, intermediates, now),
            None => Err(rustls::Error::General("no client authority is configured".to_owned())),
        }
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        rustls::crypto::verify_tls12_signature(message, cert, dss, &provider().signature_verification_algorithms)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        rustls::crypto::verify_tls13_signature(message, cert, dss, &provider().signature_verification_algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        provider().signature_verification_algorithms.supported_schemes()
    }
}

/// A replica's authority from PEM.
pub fn ca(pem: &[u8], path: &Path) -> Result<Arc<CaType>> {
    let certs = ders(pem, path)?;
    // Pingora's own parser panics on what is no certificate: ask rustls first.
    let mut roots = RootCertStore::empty();
    for der in &certs {
        roots.add(CertificateDer::from(der.as_slice())).map_err(|e| {
            Error::explain(ErrorType::InvalidCert, format!("{} is no authority's certificate: {e}", path.display()))
        })?;
    }
    Ok(certs.into_iter().map(|der| WrappedX509::new(der, pingora::utils::tls::parse_x509)).collect::<Vec<_>>().into())
}

/// A client certificate and its key from PEM.
pub fn client_pair(cert: &[u8], key: &[u8], path: &Path) -> Result<Arc<CertKey>> {
    let certs = ders(cert, path)?;
    let key = PrivateKeyDer::from_pem_slice(key).map_err(|e| {
        Error::explain(ErrorType::InvalidCert, format!("the private key beside {} cannot be read: {e}", path.display()))
    })?;
    let chain = certs.iter().map(|der| CertificateDer::from(der.clone())).collect();
    CertifiedKey::from_der(chain, key.clone_key(), &provider()).map_err(|e| {
        Error::explain(ErrorType::InvalidCert, format!("{} and its key do not belong together: {e}", path.display()))
    })?;
    Ok(Arc::new(CertKey::new(certs, key.secret_der().to_vec())))
}

fn ders(pem: &[u8], path: &Path) -> Result<Vec<Vec<u8>>> {
    let certs: Vec<Vec<u8>> = CertificateDer::pem_slice_iter(pem)
        .map(|c| c.map(|c| c.as_ref().to_vec()))
        .collect::<Result<_, _>>()
        .map_err(|e| Error::explain(ErrorType::InvalidCert, format!("{}: {e}", path.display())))?;
    if certs.is_empty() {
        return Err(Error::explain(ErrorType::InvalidCert, format!("{} holds no certificate", path.display())));
    }
    Ok(certs)
}
