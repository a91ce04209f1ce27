//! The gRPC listener's TLS.

use std::sync::Arc;

use rustls::crypto::{CryptoProvider, aws_lc_rs};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::{NoServerSessionStorage, WebPkiClientVerifier};
use rustls::{RootCertStore, ServerConfig, SupportedCipherSuite, SupportedProtocolVersion};
use sha2::{Digest, Sha256};

use crate::options::Options;

/// Certificate chain and private key, PEM.
#[derive(Clone)]
pub struct ServerPair {
    /// Where it comes from, for messages.
    pub origin: String,
    /// The whole chain, leaf first.
    pub certificate: Vec<u8>,
    /// PKCS#8, PKCS#1 or SEC1.
    pub key: Vec<u8>,
}

/// SHA-256 of a certificate's DER as blocklists have it: upper-case hex without separators.
pub fn fingerprint(der: &[u8]) -> String {
    Sha256::digest(der).iter().map(|byte| format!("{byte:02X}")).collect()
}

/// Checks `--tls-*` and builds the configuration. With `client_roots`, a client certificate from one of them is
/// required; the system's own roots never count.
pub fn server_config(
    options: &Options,
    pair: &ServerPair,
    client_roots: Option<RootCertStore>,
) -> Result<ServerConfig, String> {
    let (versions, provider) = policy(options)?;
    let provider = Arc::new(provider);
    let builder = ServerConfig::builder_with_provider(provider.clone())
        .with_protocol_versions(&versions)
        .map_err(|error| format!("TLS versions: {error}"))?;
    let builder = match client_roots {
        Some(roots) => builder.with_client_cert_verifier(
            WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider)
                .build()
                .map_err(|error| format!("client CA: {error}"))?,
        ),
        None => builder.with_no_client_auth(),
    };
    let chain = CertificateDer::pem_slice_iter(&pair.certificate)
        .collect::<Result<Vec<_>, _>>()
        .map_err(|error| format!("{}: certificate: {error}", pair.origin))?;
    if chain.is_empty() {
        return Err(format!("{}: there is no certificate in it", pair.origin));
    }
    let key = PrivateKeyDer::from_pem_slice(&pair.key)
        .map_err(|error| format!("{}: private key: {error}", pair.origin))?;
    let mut config =
        builder.with_single_cert(chain, key).map_err(|error| format!("{}: {error}", pair.origin))?;
    // gRPC peers refuse a server that does not negotiate h2.
    config.alpn_protocols = vec![b"h2".to_vec()];
    // No resumption: a resumed session would carry a client certificate that was checked against an older CA.
    config.session_storage = Arc::new(NoServerSessionStorage {});
    config.send_tls13_tickets = 0;
    Ok(config)
}

/// The certificates of one or more PEM texts as trust anchors.
pub fn roots(origin: &str, texts: &[&[u8]]) -> Result<RootCertStore, String> {
    let mut store = RootCertStore::empty();
    for text in texts {
        for der in CertificateDer::pem_slice_iter(text) {
            let der = der.map_err(|error| format!("{origin}: CA certificate: {error}"))?;
            store.add(der).map_err(|error| format!("{origin}: CA certificate: {error}"))?;
        }
    }
    if store.is_empty() { Err(format!("{origin}: there is no CA certificate in it")) } else { Ok(store) }
}

/// Names for `--tls-ciphersuites list`.
pub fn cipher_suite_names() -> Vec<String> {
    aws_lc_rs::default_provider().cipher_suites.iter().map(go_name).collect()
}

fn policy(options: &Options) -> Result<(Vec<&'static SupportedProtocolVersion>, CryptoProvider), String> {
    let low = rank(&options.tls_min_version, "tls-min-version")?.unwrap_or(3);
    let high = rank(&options.tls_max_version, "tls-max-version")?.unwrap_or(3);
    if low > high {
        return Err(format!(
            "--tls-min-version {} is above --tls-max-version {}",
            options.tls_min_version, options.tls_max_version
        ));
    }
    if high < 2 {
        return Err(
            "--tls-max-version tls1.1: TLS 1.1 is broken and not supported: use tls1.2 or tls1.3".to_owned()
        );
    }
    let versions: Vec<_> = [(2, &rustls::version::TLS12), (3, &rustls::version::TLS13)]
        .into_iter()
        .filter(|(rank, _)| (low..=high).contains(rank))
        .map(|(_, version)| version)
        .collect();
    let mut provider = aws_lc_rs::default_provider();
    if !options.tls_ciphersuites.is_empty() {
        let wanted = &options.tls_ciphersuites;
        for name in wanted {
            let suite =
                provider.cipher_suites.iter().find(|suite| go_name(suite) == *name).ok_or_else(|| {
                    format!("--tls-ciphersuites: {name} is not supported: \"list\" prints those that are")
                })?;
            let of_low = matches!(suite, SupportedCipherSuite::Tls13(_)) == (low == 3);
            if !of_low {
                return Err(format!(
                    "--tls-ciphersuites: {name} does not go with --tls-min-version {}",
                    options.tls_min_version
                ));
            }
        }
        // The list rules TLS 1.2 only, as in Go: the suites of 1.3 are all sound.
        provider.cipher_suites.retain(|suite| {
            matches!(suite, SupportedCipherSuite::Tls13(_)) || wanted.contains(&go_name(suite))
        });
    }
    Ok((versions, provider))
}

fn rank(word: &str, flag: &str) -> Result<Option<u8>, String> {
    match word {
        "" => Ok(None),
        "tls1.1" => Ok(Some(1)),
        "tls1.2" => Ok(Some(2)),
        "tls1.3" => Ok(Some(3)),
        other => Err(format!("--{flag} {other:?}: use tls1.1, tls1.2 or tls1.3")),
    }
}

fn go_name(suite: &SupportedCipherSuite) -> String {
    let name = format!("{:?}", suite.suite());
    name.strip_prefix("TLS13_").map_or(name.clone(), |rest| format!("TLS_{rest}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn options(low: &str, high: &str, suites: &[&str]) -> Options {
        Options {
            tls_min_version: low.into(),
            tls_max_version: high.into(),
            tls_ciphersuites: suites.iter().map(|suite| (*suite).into()).collect(),
            ..Options::default()
        }
    }

    #[test]
    fn versions_and_suites() {
        let count = |low, high, suites: &[&str]| policy(&options(low, high, suites)).map(|(v, _)| v.len());
        assert_eq!(count("tls1.3", "", &[]), Ok(1));
        assert_eq!(count("", "", &[]), Ok(1));
        assert_eq!(count("tls1.2", "", &["TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256"]), Ok(2));
        assert_eq!(count("tls1.1", "tls1.2", &[]), Ok(1));
        assert_eq!(count("tls1.3", "", &["TLS_AES_128_GCM_SHA256"]), Ok(1));
        for (low, high, suites) in [
            ("tls1.0", "", &[][..]),
            ("tls1.3", "tls1.2", &[]),
            ("tls1.1", "tls1.1", &[]),
            ("tls1.3", "", &["TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256"]),
            ("tls1.2", "", &["TLS_AES_128_GCM_SHA256"]),
            ("tls1.2", "", &["TLS_ECDHE_RSA_WITH_AES_128_CBC_SHA"]),
        ] {
            assert!(count(low, high, suites).is_err(), "{low} {high} {suites:?}");
        }
    }

    #[test]
    fn keys_of_all_shapes_with_comments_and_crlf() {
        use crate::pki::{Authority, KeyAlgorithm, Purpose, RsaBits, new_authority};
        let ca = new_authority(10, KeyAlgorithm::EcdsaP256).unwrap();
        let authority = Authority::from_pem(&ca.certificate, &ca.key).unwrap();
        let purpose = Purpose::Server { ips: vec![], dns: vec!["hub".into()] };
        for algorithm in [KeyAlgorithm::Rsa(RsaBits::B2048), KeyAlgorithm::EcdsaP384, KeyAlgorithm::Ed25519] {
            let leaf = authority.issue("principal", &purpose, 5, algorithm).unwrap();
            let chain = format!("a comment\n{}\nanother\n{}", leaf.certificate, ca.certificate);
            let pair = ServerPair {
                origin: "test".into(),
                certificate: chain.replace('\n', "\r\n").into_bytes(),
                key: leaf.key.replace('\n', "\r\n").into_bytes(),
            };
            let roots = roots("test", &[ca.certificate.as_bytes()]).unwrap();
            server_config(&options("tls1.2", "", &[]), &pair, Some(roots)).unwrap();
        }
    }

    #[test]
    fn bad_material_names_its_origin() {
        let pair = ServerPair { origin: "secret a/b".into(), certificate: b"x".to_vec(), key: b"x".to_vec() };
        let error = server_config(&options("tls1.3", "", &[]), &pair, None).unwrap_err();
        assert!(error.contains("secret a/b"), "{error}");
        assert!(roots("secret a/ca", &[b"junk"]).unwrap_err().contains("secret a/ca"));
    }
}
