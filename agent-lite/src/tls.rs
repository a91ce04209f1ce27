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

/// A client configuration. Errors start with the piece that is wrong: `CA bundle`, `client certificate`, `client key`.
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

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    use rustls::ServerConfig;
    use rustls::server::WebPkiClientVerifier;
    use rustls::time_provider::TimeProvider;
    use tokio_rustls::{TlsAcceptor, TlsConnector};

    const CA: &[u8] = include_bytes!("../tests/data/ca.crt");
    const SERVER: &[u8] = include_bytes!("../tests/data/server.crt");
    const SERVER_KEYS: [&[u8]; 2] =
        [include_bytes!("../tests/data/server.pkcs8.key"), include_bytes!("../tests/data/server.sec1.key")];
    const RSA: &[u8] = include_bytes!("../tests/data/rsa.crt");
    const RSA_KEYS: [&[u8]; 2] =
        [include_bytes!("../tests/data/rsa.pkcs1.key"), include_bytes!("../tests/data/rsa.pkcs8.key")];

    fn material(client: Option<(&[u8], &[u8])>) -> Material {
        Material { roots: Some(CA.into()), client: client.map(|(chain, key)| (chain.into(), key.into())) }
    }

    fn config(material: &Material) -> Result<Arc<ClientConfig>, String> {
        client_config(material, &Limits::none(), &[b"h2"])
    }

    #[test]
    fn every_shape_of_certificates_and_keys() {
        for key in RSA_KEYS {
            config(&material(Some((RSA, key)))).unwrap();
        }
        for key in SERVER_KEYS {
            config(&material(Some((SERVER, key)))).unwrap();
        }
        // A chain, comments, CRLF line ends.
        let chain = [b"# the leaf\r\n", RSA, b"subject=/CN=CA\n", CA].concat();
        let chain = String::from_utf8(chain).unwrap().replace('\n', "\r\n");
        config(&material(Some((chain.as_bytes(), RSA_KEYS[0])))).unwrap();
        assert_eq!(certificates(chain.as_bytes()).unwrap().len(), 2);
    }

    #[test]
    fn errors_say_which_piece_is_wrong() {
        for (material, part) in [
            (material(Some((SERVER, RSA_KEYS[0]))), "do not fit together"),
            (material(Some((RSA_KEYS[0], RSA_KEYS[0]))), "client certificate: no PEM certificate"),
            (material(Some((RSA, RSA))), "client key: no PEM private key"),
            (
                material(Some((b"-----BEGIN CERTIFICATE-----\n!\n-----END CERTIFICATE-----\n", RSA))),
                "broken PEM",
            ),
            (Material { roots: Some(b"".to_vec()), client: None }, "CA bundle: no PEM certificate"),
        ] {
            let error = config(&material).unwrap_err();
            assert!(error.contains(part), "{error}");
        }
        let limits = Limits { suites: vec!["TLS_RSA_WITH_RC4_128_SHA".into()], ..Limits::none() };
        let error = client_config(&material(None), &limits, &[]).unwrap_err();
        assert!(error.contains("TLS_RSA_WITH_RC4_128_SHA"), "{error}");
        let limits =
            Limits { suites: vec!["TLS_ECDHE_RSA_WITH_CHACHA20_POLY1305_SHA256".into()], ..Limits::none() };
        client_config(&material(None), &limits, &[]).unwrap();
    }

    #[test]
    fn dates_are_read() {
        let (not_before, not_after) = validity(&certificates(CA).unwrap()[0]).unwrap();
        assert!(not_before > 1_700_000_000, "{not_before}");
        assert_eq!(not_after - not_before, 36_500 * 86_400);
        let at = |seconds: i64| UNIX_EPOCH + Duration::from_secs(u64::try_from(seconds).unwrap());
        assert_eq!(date_problem(CA, at(not_before)), None);
        assert!(date_problem(CA, at(0)).unwrap().starts_with("not valid before 20"));
        assert!(date_problem(CA, at(not_after + 1)).unwrap().starts_with("expired on 21"));
        assert_eq!(date_problem(b"", at(0)), None);
        assert_eq!(time(0x17, b"700101000000Z"), Some(0));
        assert_eq!(time(0x18, b"20000229120000Z"), Some(951_825_600));
        assert_eq!(time(0x17, b"70"), None);
    }

    #[test]
    fn cut_certificates_do_no_harm() {
        let certificate = certificates(CA).unwrap().remove(0);
        for end in 0..certificate.len() {
            let _ = validity(&certificate[..end]);
        }
    }

    #[derive(Debug)]
    struct At(u64);

    impl TimeProvider for At {
        fn current_time(&self) -> Option<UnixTime> {
            Some(UnixTime::since_unix_epoch(Duration::from_secs(self.0)))
        }
    }

    /// A handshake with a server that asks for certificates of our CA; what either side says.
    async fn handshake(client: ClientConfig, name: &str, alpn: &[&[u8]]) -> Result<(), rustls::Error> {
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let verifier =
            WebPkiClientVerifier::builder_with_provider(Arc::new(roots(CA).unwrap()), Arc::clone(&provider))
                .build()
                .unwrap();
        let mut server = ServerConfig::builder_with_provider(provider)
            .with_protocol_versions(&[&rustls::version::TLS13])
            .unwrap()
            .with_client_cert_verifier(verifier)
            .with_single_cert(
                certificates(SERVER).unwrap(),
                PrivateKeyDer::from_pem_slice(SERVER_KEYS[0]).unwrap(),
            )
            .unwrap();
        server.alpn_protocols = alpn.iter().map(|name| name.to_vec()).collect();
        let (near, far) = tokio::io::duplex(16 << 10);
        let name = ServerName::try_from(name.to_owned()).unwrap();
        let connector = TlsConnector::from(Arc::new(client));
        let acceptor = TlsAcceptor::from(Arc::new(server));
        let (client, server) = tokio::join!(connector.connect(name, near), acceptor.accept(far));
        let inner = |error: std::io::Error| *error.into_inner().unwrap().downcast::<rustls::Error>().unwrap();
        client.map(drop).map_err(inner)?;
        server.map(drop).map_err(inner)
    }

    fn client(material: &Material) -> ClientConfig {
        Arc::unwrap_or_clone(config(material).unwrap())
    }

    #[tokio::test]
    async fn handshakes_by_name_and_address() {
        for name in ["hub.example", "127.0.0.1"] {
            for (chain, key) in [(RSA, RSA_KEYS[0]), (SERVER, SERVER_KEYS[1])] {
                handshake(client(&material(Some((chain, key)))), name, &[b"h2"]).await.unwrap();
            }
        }
        let trusting = Material { roots: None, ..material(Some((RSA, RSA_KEYS[0]))) };
        handshake(client(&trusting), "any.example", &[b"h2"]).await.unwrap();
    }

    #[tokio::test]
    async fn failed_handshakes_say_what_to_do() {
        let good = material(Some((RSA, RSA_KEYS[0])));
        let foreign = Material { roots: Some(RSA.into()), ..good.clone() };
        let tls12 = Limits { max: TlsVersion::V1_2, ..Limits::none() };
        let old = Arc::unwrap_or_clone(client_config(&good, &tls12, &[b"h2"]).unwrap());
        for (config, name, alpn, part) in [
            (client(&foreign), "hub.example", b"h2", "CA bundle is not the one"),
            (client(&good), "other.example", b"h2", "not in the server's certificate"),
            (client(&good), "hub.example", b"h1", "does not speak HTTP/2"),
            (old, "hub.example", b"h2", "--tls-min-version"),
        ] {
            let error = handshake(config, name, &[alpn]).await.unwrap_err();
            assert!(explain(&error).contains(part), "{}", explain(&error));
            assert!(!is_clock_problem(&error));
        }
        // The server refuses after the client is done, as TLS 1.3 has it.
        assert!(handshake(client(&material(None)), "hub.example", &[b"h2"]).await.is_err());
    }

    #[tokio::test]
    async fn a_wrong_clock_is_told_from_a_wrong_certificate() {
        for seconds in [0, 60_000_000_000] {
            let mut config = client(&material(Some((RSA, RSA_KEYS[0]))));
            config.time_provider = Arc::new(At(seconds));
            let error = handshake(config, "hub.example", &[b"h2"]).await.unwrap_err();
            assert!(is_clock_problem(&error), "{error}");
        }
    }
}
