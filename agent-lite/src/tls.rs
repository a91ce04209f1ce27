//! TLS configurations: certificates, keys and CA bundles from PEM, checked so that an error names the culprit.

use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::CryptoProvider;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime};
use rustls::{
    AlertDescription, CertificateError, ClientConfig, DigitallySignedStruct, RootCertStore, SignatureScheme,
    SupportedProtocolVersion,
};

use crate::args::TlsVersion;

/// What a configuration is made of.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Material {
    /// PEM with CA certificates; `None` trusts whoever answers.
    pub(crate) roots: Option<Vec<u8>>,
    /// PEM with certificate chain, PEM with key.
    pub(crate) client: Option<(Vec<u8>, Vec<u8>)>,
}

/// Restrictions on the handshake.
#[derive(Clone, Debug)]
pub(crate) struct Limits {
    pub(crate) min: TlsVersion,
    pub(crate) max: TlsVersion,
    /// Names of suites up to TLS 1.2; empty for all.
    pub(crate) suites: Vec<String>,
}

impl Limits {
    /// Whatever is safe.
    pub(crate) const fn none() -> Self {
        Self { min: TlsVersion::V1_2, max: TlsVersion::V1_3, suites: Vec::new() }
    }
}

/// A client configuration. Errors name `where_from`, e.g. the Secret.
pub(crate) fn client_config(
    material: &Material,
    limits: &Limits,
    alpn: &[&[u8]],
) -> Result<Arc<ClientConfig>, String> {
    let provider = Arc::new(provider(&limits.suites)?);
    let versions: Vec<&'static SupportedProtocolVersion> =
        [(TlsVersion::V1_2, &rustls::version::TLS12), (TlsVersion::V1_3, &rustls::version::TLS13)]
            .into_iter()
            .filter(|(version, _)| (limits.min..=limits.max).contains(version))
            .map(|(_, protocol)| protocol)
            .collect();
    let builder = ClientConfig::builder_with_provider(Arc::clone(&provider))
        .with_protocol_versions(&versions)
        .map_err(|error| format!("no cipher suite fits the TLS versions: {error}"))?;
    let builder = match &material.roots {
        Some(pem) => builder.with_root_certificates(roots(pem)?),
        None => builder.dangerous().with_custom_certificate_verifier(Arc::new(AcceptAny { provider })),
    };
    let mut config = match &material.client {
        None => builder.with_no_client_auth(),
        Some((chain, key)) => {
            let chain = certificates(chain).map_err(|error| format!("client certificate: {error}"))?;
            let key = PrivateKeyDer::from_pem_slice(key)
                .map_err(|_| "client key: no PEM private key (PKCS#8, PKCS#1 or SEC1)".to_owned())?;
            builder
                .with_client_auth_cert(chain, key)
                .map_err(|error| format!("client certificate and key do not fit together: {error}"))?
        }
    };
    config.alpn_protocols = alpn.iter().map(|name| name.to_vec()).collect();
    Ok(Arc::new(config))
}

/// Every certificate of a PEM file; comments and CRLF are fine.
pub(crate) fn certificates(pem: &[u8]) -> Result<Vec<CertificateDer<'static>>, String> {
    let chain: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(pem).collect();
    match chain {
        Ok(chain) if chain.is_empty() => Err("no PEM certificate".into()),
        Ok(chain) => Ok(chain),
        Err(error) => Err(format!("broken PEM: {error:?}")),
    }
}

/// What is wrong with the dates of a chain right now, if anything. The clock may be what is wrong.
pub(crate) fn date_problem(pem: &[u8], now: SystemTime) -> Option<String> {
    let now = i64::try_from(now.duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())).ok()?;
    for certificate in certificates(pem).ok()? {
        let (not_before, not_after) = validity(&certificate)?;
        if now < not_before {
            return Some(format!("not valid before {}", day(not_before)));
        }
        if now > not_after {
            return Some(format!("expired on {}", day(not_after)));
        }
    }
    None
}

/// Whether a failed handshake may be the fault of a clock.
pub(crate) fn is_clock_problem(error: &rustls::Error) -> bool {
    match error {
        rustls::Error::InvalidCertificate(error) => matches!(
            error,
            CertificateError::Expired
                | CertificateError::ExpiredContext { .. }
                | CertificateError::NotValidYet
                | CertificateError::NotValidYetContext { .. }
        ),
        rustls::Error::AlertReceived(alert) => *alert == AlertDescription::CertificateExpired,
        _ => false,
    }
}

/// A failed handshake with what to do about it.
pub(crate) fn explain(error: &rustls::Error) -> String {
    let hint = match error {
        rustls::Error::InvalidCertificate(CertificateError::UnknownIssuer) => {
            "; the CA bundle is not the one that signed the server's certificate"
        }
        rustls::Error::InvalidCertificate(
            CertificateError::NotValidForName | CertificateError::NotValidForNameContext { .. },
        ) => "; the address is not in the server's certificate",
        rustls::Error::NoApplicationProtocol
        | rustls::Error::AlertReceived(AlertDescription::NoApplicationProtocol) => {
            "; the server does not speak HTTP/2: is something between agent and principal?"
        }
        rustls::Error::AlertReceived(AlertDescription::ProtocolVersion) => {
            "; no TLS version in common: see --tls-min-version and --tls-max-version"
        }
        rustls::Error::AlertReceived(
            AlertDescription::BadCertificate
            | AlertDescription::UnknownCA
            | AlertDescription::CertificateUnknown
            | AlertDescription::CertificateRequired
            | AlertDescription::AccessDenied,
        ) => "; the server does not accept this client certificate",
        _ => "",
    };
    format!("{error}{hint}")
}

/// Names of the cipher suites up to TLS 1.2 that `--tls-ciphersuites` takes.
pub(crate) fn suite_names() -> Vec<&'static str> {
    rustls::crypto::ring::ALL_CIPHER_SUITES.iter().filter_map(|suite| suite.suite().as_str()).collect()
}

fn provider(suites: &[String]) -> Result<CryptoProvider, String> {
    let mut provider = rustls::crypto::ring::default_provider();
    if suites.is_empty() {
        return Ok(provider);
    }
    for name in suites {
        if !suite_names().iter().any(|known| go_name(known) == go_name(name)) {
            return Err(format!(
                "--tls-ciphersuites: {name} is unknown or too weak; 'list' prints what there is"
            ));
        }
    }
    // As in the reference, the list says nothing about TLS 1.3.
    provider.cipher_suites.retain(|suite| {
        suite.tls13().is_some()
            || suite
                .suite()
                .as_str()
                .is_some_and(|known| suites.iter().any(|name| go_name(known) == go_name(name)))
    });
    Ok(provider)
}

/// The names differ in details: `TLS13_` for `TLS_`, and the hash at the end of ChaCha20 suites.
fn go_name(name: &str) -> String {
    name.replace("TLS13_", "TLS_").trim_end_matches("_SHA256").to_owned()
}

fn roots(pem: &[u8]) -> Result<RootCertStore, String> {
    let mut store = RootCertStore::empty();
    for certificate in certificates(pem).map_err(|error| format!("CA bundle: {error}"))? {
        store.add(certificate).map_err(|error| format!("CA bundle: unusable certificate: {error}"))?;
    }
    Ok(store)
}

/// `notBefore` and `notAfter` as seconds since 1970.
fn validity(certificate: &[u8]) -> Option<(i64, i64)> {
    let (_, certificate, _) = der(certificate)?;
    let (_, mut fields, _) = der(certificate)?;
    // version [0] (optional), serialNumber, signature, issuer, validity.
    for _ in 0..5 {
        let (tag, content, rest) = der(fields)?;
        fields = rest;
        if tag == 0x30 {
            let (tag, first, rest) = der(content)?;
            if tag == 0x17 || tag == 0x18 {
                let (tag_after, second, _) = der(rest)?;
                return Some((time(tag, first)?, time(tag_after, second)?));
            }
        }
    }
    None
}

/// One DER element: tag, content, what follows.
fn der(bytes: &[u8]) -> Option<(u8, &[u8], &[u8])> {
    let (&tag, rest) = bytes.split_first()?;
    let (&first, rest) = rest.split_first()?;
    let (length, rest) = if first < 0x80 {
        (usize::from(first), rest)
    } else {
        let count = usize::from(first & 0x7f);
        let (digits, rest) = rest.split_at_checked(count).filter(|_| count <= 4)?;
        (digits.iter().fold(0usize, |length, byte| length << 8 | usize::from(*byte)), rest)
    };
    let (content, rest) = rest.split_at_checked(length)?;
    Some((tag, content, rest))
}

/// UTCTime or GeneralizedTime.
fn time(tag: u8, text: &[u8]) -> Option<i64> {
    let text = std::str::from_utf8(text).ok()?;
    let (year, rest) = if tag == 0x17 {
        let year: i64 = text.get(..2)?.parse().ok()?;
        (if year < 50 { 2000 + year } else { 1900 + year }, text.get(2..)?)
    } else {
        (text.get(..4)?.parse().ok()?, text.get(4..)?)
    };
    let part = |at: usize| rest.get(at..at + 2)?.parse::<i64>().ok();
    let (month, day) = (part(0)?, part(2)?);
    let (hour, minute, second) = (part(4)?, part(6)?, part(8)?);
    if !(1..=12).contains(&month) || !(1..=31).contains(&day) {
        return None;
    }
    // Days since 1970-01-01, counted from 1 March so that the leap day is the last.
    let (y, m) = if month > 2 { (year, month - 3) } else { (year - 1, month + 9) };
    let days =
        365 * y + y.div_euclid(4) - y.div_euclid(100) + y.div_euclid(400) + (153 * m + 2) / 5 + day - 719_469;
    Some(days * 86_400 + hour * 3600 + minute * 60 + second)
}

fn day(seconds: i64) -> String {
    let seconds = u64::try_from(seconds).unwrap_or(0);
    crate::log::timestamp(UNIX_EPOCH + std::time::Duration::from_secs(seconds))
}

/// `--insecure-tls` and `insecure-skip-tls-verify`: whoever answers is trusted.
#[derive(Debug)]
struct AcceptAny {
    provider: Arc<CryptoProvider>,
}

impl ServerCertVerifier for AcceptAny {
    fn verify_server_cert(
        &self,
        _end_entity: &CertificateDer<'_>,
        _intermediates: &[CertificateDer<'_>],
        _server_name: &ServerName<'_>,
        _ocsp_response: &[u8],
        _now: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        rustls::crypto::verify_tls12_signature(
            message,
            cert,
            dss,
            &self.provider.signature_verification_algorithms,
        )
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        rustls::crypto::verify_tls13_signature(
            message,
            cert,
            dss,
            &self.provider.signature_verification_algorithms,
        )
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.provider.signature_verification_algorithms.supported_schemes()
    }
}
