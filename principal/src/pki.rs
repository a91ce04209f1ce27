//! Certificate profiles of the development PKI, byte-compatible in what peers check with the reference CLI's.

use std::fmt;
use std::net::IpAddr;

use rcgen::{
    BasicConstraints, CertificateParams, DistinguishedName, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer,
    KeyPair, KeyUsagePurpose, RsaKeySize, SanType, SerialNumber,
};
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject;
use time::{Duration, OffsetDateTime};
use x509_parser::prelude::{FromDer, X509Certificate};

/// The kinds of private key that can be generated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KeyAlgorithm {
    /// RSA with a modulus of so many bits.
    Rsa(RsaBits),
    /// ECDSA over NIST P-256.
    EcdsaP256,
    /// ECDSA over NIST P-384.
    EcdsaP384,
    /// ECDSA over NIST P-521.
    EcdsaP521,
    /// Ed25519.
    Ed25519,
}

/// RSA modulus sizes that the CLI offers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RsaBits {
    /// 2048 bits.
    B2048,
    /// 3072 bits.
    B3072,
    /// 4096 bits, the default.
    B4096,
}

impl KeyAlgorithm {
    /// From the words of `--key-algorithm` and `--key-size`; the size counts for RSA only.
    pub fn parse(algorithm: &str, size: u32) -> Result<Self, String> {
        Ok(match algorithm {
            "rsa" => Self::Rsa(match size {
                2048 => RsaBits::B2048,
                3072 => RsaBits::B3072,
                4096 => RsaBits::B4096,
                other => return Err(format!("key size {other} is not supported: use 2048, 3072 or 4096")),
            }),
            "ecdsa-p256" => Self::EcdsaP256,
            "ecdsa-p384" => Self::EcdsaP384,
            "ecdsa-p521" => Self::EcdsaP521,
            "ed25519" => Self::Ed25519,
            other => {
                return Err(format!(
                    "key algorithm {other:?} is not supported: use rsa, ecdsa-p256, ecdsa-p384, ecdsa-p521 or ed25519"
                ));
            }
        })
    }

    fn generate(self) -> Result<KeyPair, rcgen::Error> {
        match self {
            Self::Rsa(bits) => KeyPair::generate_rsa_for(
                &rcgen::PKCS_RSA_SHA256,
                match bits {
                    RsaBits::B2048 => RsaKeySize::_2048,
                    RsaBits::B3072 => RsaKeySize::_3072,
                    RsaBits::B4096 => RsaKeySize::_4096,
                },
            ),
            Self::EcdsaP256 => KeyPair::generate_for(&rcgen::PKCS_ECDSA_P256_SHA256),
            Self::EcdsaP384 => KeyPair::generate_for(&rcgen::PKCS_ECDSA_P384_SHA384),
            Self::EcdsaP521 => KeyPair::generate_for(&rcgen::PKCS_ECDSA_P521_SHA512),
            Self::Ed25519 => KeyPair::generate_for(&rcgen::PKCS_ED25519),
        }
    }
}

/// A certificate and its private key (PKCS#8), both as PEM.
#[derive(Clone)]
pub struct Pair {
    /// `tls.crt`
    pub certificate: String,
    /// `tls.key`
    pub key: String,
}

/// What a leaf certificate is for.
#[derive(Clone, Debug)]
pub enum Purpose {
    /// serverAuth, with these names and addresses.
    Server {
        /// iPAddress SANs.
        ips: Vec<IpAddr>,
        /// dNSName SANs.
        dns: Vec<String>,
    },
    /// clientAuth; the identity is the common name.
    Client,
}

/// A signing CA read back from its Secret.
pub struct Authority {
    issuer: Issuer<'static, KeyPair>,
    not_after: OffsetDateTime,
    certificate: String,
}

impl fmt::Debug for Authority {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Authority").field("not_after", &self.not_after).finish_non_exhaustive()
    }
}

impl Authority {
    /// From `tls.crt` and `tls.key`; the first certificate is the CA's.
    pub fn from_pem(certificate: &str, key: &str) -> Result<Self, String> {
        let der = first_certificate(certificate)?;
        let (_, parsed) = X509Certificate::from_der(&der).map_err(|error| format!("certificate: {error}"))?;
        let key = KeyPair::from_pem(key).map_err(|error| format!("private key: {error}"))?;
        check_pair(&parsed, &key)?;
        let not_after = parsed.validity().not_after.to_datetime();
        let issuer = Issuer::from_ca_cert_der(&der, key).map_err(|error| format!("certificate: {error}"))?;
        Ok(Self { issuer, not_after, certificate: encode_pem("CERTIFICATE", &der) })
    }

    /// The CA's certificate alone, encoded again.
    pub fn certificate_pem(&self) -> &str {
        &self.certificate
    }

    /// Issues a leaf that is valid from now on for `days` calendar days.
    pub fn issue(
        &self,
        common_name: &str,
        purpose: &Purpose,
        days: i64,
        algorithm: KeyAlgorithm,
    ) -> Result<Pair, String> {
        if days <= 0 {
            return Err(format!("a lifetime of {days} days is not possible: it must be at least 1"));
        }
        let now = OffsetDateTime::now_utc();
        let not_after = lifetime_end(now, days)?;
        if not_after > self.not_after {
            let most = (self.not_after - now).whole_days();
            return Err(format!(
                "a lifetime of {days} days goes beyond the end of the CA certificate: at most about {most} days are possible"
            ));
        }
        let mut params = profile(common_name, now, not_after);
        params.is_ca = IsCa::ExplicitNoCa;
        params.use_authority_key_identifier_extension = true;
        match purpose {
            Purpose::Client => params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ClientAuth],
            Purpose::Server { ips, dns } => {
                params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
                params.subject_alt_names = sans(ips, dns)?;
            }
        }
        let key = algorithm.generate().map_err(|error| format!("generating a key: {error}"))?;
        let certificate = params
            .signed_by(&key, &self.issuer)
            .map_err(|error| format!("signing a certificate: {error}"))?;
        Ok(Pair { certificate: certificate.pem(), key: key.serialize_pem() })
    }
}

/// A new self-signed CA.
pub fn new_authority(days: i64, algorithm: KeyAlgorithm) -> Result<Pair, String> {
    if days <= 0 {
        return Err(format!("a lifetime of {days} days is not possible: it must be at least 1"));
    }
    let now = OffsetDateTime::now_utc();
    let mut params = profile(CA_COMMON_NAME, now, lifetime_end(now, days)?);
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    params.extended_key_usages =
        vec![ExtendedKeyUsagePurpose::ClientAuth, ExtendedKeyUsagePurpose::ServerAuth];
    self_signed(params, algorithm)
}

/// A throw-away server certificate for `--insecure-tls-generate`: one hour either side of now, so that clocks may
/// differ a little, and not from any CA.
pub fn throw_away_server() -> Result<Pair, String> {
    let now = OffsetDateTime::now_utc();
    let mut params = CertificateParams::default();
    params.distinguished_name = DistinguishedName::new();
    params.distinguished_name.push(DnType::CommonName, GENERATED_NAME);
    params.serial_number = Some(SerialNumber::from(1));
    params.not_before = now - Duration::hours(1);
    params.not_after = now + Duration::hours(1);
    params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
    params.subject_alt_names = sans(&[IpAddr::from([127, 0, 0, 1])], &[GENERATED_NAME.to_owned()])?;
    self_signed(params, KeyAlgorithm::Rsa(RsaBits::B2048))
}

/// A random RSA private key as PKCS#8 PEM: the JWT signing key.
pub fn rsa_key(bits: RsaBits) -> Result<String, String> {
    let key = KeyAlgorithm::Rsa(bits).generate().map_err(|error| format!("generating a key: {error}"))?;
    Ok(key.serialize_pem())
}

/// Whether a certificate (the first of a PEM text) belongs to a private key.
pub fn check_key_pair(certificate: &str, key: &str) -> Result<(), String> {
    let der = first_certificate(certificate)?;
    let (_, parsed) = X509Certificate::from_der(&der).map_err(|error| format!("certificate: {error}"))?;
    let key = KeyPair::from_pem(key).map_err(|error| format!("private key: {error}"))?;
    check_pair(&parsed, &key)
}

fn check_pair(certificate: &X509Certificate<'_>, key: &KeyPair) -> Result<(), String> {
    if certificate.public_key().subject_public_key.data.as_ref() == key.public_key_raw() {
        Ok(())
    } else {
        Err("the private key does not belong to the certificate".to_owned())
    }
}

fn first_certificate(pem: &str) -> Result<CertificateDer<'static>, String> {
    CertificateDer::from_pem_slice(pem.as_bytes()).map_err(|error| format!("certificate: {error}"))
}

fn encode_pem(label: &str, der: &[u8]) -> String {
    use base64::Engine as _;
    let text = base64::engine::general_purpose::STANDARD.encode(der);
    let mut out = format!("-----BEGIN {label}-----\n");
    let mut rest = text.as_str();
    while !rest.is_empty() {
        let (line, tail) = rest.split_at(rest.len().min(64));
        out.push_str(line);
        out.push('\n');
        rest = tail;
    }
    out.push_str(&format!("-----END {label}-----\n"));
    out
}

fn self_signed(params: CertificateParams, algorithm: KeyAlgorithm) -> Result<Pair, String> {
    let key = algorithm.generate().map_err(|error| format!("generating a key: {error}"))?;
    let certificate = params.self_signed(&key).map_err(|error| format!("signing a certificate: {error}"))?;
    Ok(Pair { certificate: certificate.pem(), key: key.serialize_pem() })
}

/// What all certificates of the PKI share. Every one has serial 1, as the reference's do: nothing revokes by serial.
fn profile(common_name: &str, not_before: OffsetDateTime, not_after: OffsetDateTime) -> CertificateParams {
    let mut params = CertificateParams::default();
    // Encoded as O then CN; Go prints it `CN=…,O=…`, which the default `mtls:CN=([^,]+)` relies on.
    params.distinguished_name = DistinguishedName::new();
    params.distinguished_name.push(DnType::OrganizationName, ORGANIZATION);
    params.distinguished_name.push(DnType::CommonName, common_name);
    params.serial_number = Some(SerialNumber::from(1));
    params.not_before = not_before;
    params.not_after = not_after;
    params.key_usages = vec![KeyUsagePurpose::DigitalSignature, KeyUsagePurpose::KeyCertSign];
    params
}

fn lifetime_end(now: OffsetDateTime, days: i64) -> Result<OffsetDateTime, String> {
    days.checked_mul(86_400)
        .and_then(|seconds| now.checked_add(Duration::seconds(seconds)))
        .filter(|end| end.year() <= 9999)
        .ok_or_else(|| format!("a lifetime of {days} days is not possible"))
}

fn sans(ips: &[IpAddr], dns: &[String]) -> Result<Vec<SanType>, String> {
    let mut out: Vec<SanType> = ips.iter().map(|ip| SanType::IpAddress(*ip)).collect();
    for name in dns {
        let name = name.as_str().try_into().map_err(|error| format!("DNS name {name:?}: {error}"))?;
        out.push(SanType::DnsName(name));
    }
    Ok(out)
}

const ORGANIZATION: &str = "DO NOT USE IN PRODUCTION";
const CA_COMMON_NAME: &str = "argocd-agent-ca";
const GENERATED_NAME: &str = "argocd-agent-principal--generated";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn issues_what_the_profiles_say() {
        let ca = new_authority(3650, KeyAlgorithm::EcdsaP256).unwrap();
        let authority = Authority::from_pem(&ca.certificate, &ca.key).unwrap();
        assert_eq!(authority.certificate_pem(), ca.certificate.replace("\r\n", "\n"));
        let leaf = authority.issue("agent-1", &Purpose::Client, 180, KeyAlgorithm::Ed25519).unwrap();
        check_key_pair(&leaf.certificate, &leaf.key).unwrap();
        let der = first_certificate(&leaf.certificate).unwrap();
        let (_, parsed) = X509Certificate::from_der(&der).unwrap();
        assert!(!parsed.is_ca());
        let usage = parsed.extended_key_usage().unwrap().unwrap().value;
        assert!(usage.client_auth && !usage.server_auth);
        assert_eq!(parsed.serial.to_bytes_be(), [1]);
    }

    #[test]
    fn refuses_a_lifetime_beyond_the_ca() {
        let ca = new_authority(10, KeyAlgorithm::EcdsaP384).unwrap();
        let authority = Authority::from_pem(&ca.certificate, &ca.key).unwrap();
        let refused = authority.issue("x", &Purpose::Client, 11, KeyAlgorithm::EcdsaP521);
        assert!(refused.err().unwrap().contains("at most about"));
        assert!(authority.issue("x", &Purpose::Client, 0, KeyAlgorithm::Ed25519).is_err());
        assert!(new_authority(i64::MAX, KeyAlgorithm::Ed25519).is_err());
    }

    #[test]
    fn a_foreign_key_is_noticed() {
        let one = new_authority(10, KeyAlgorithm::EcdsaP256).unwrap();
        let other = new_authority(10, KeyAlgorithm::EcdsaP256).unwrap();
        assert!(Authority::from_pem(&one.certificate, &other.key).unwrap_err().contains("does not belong"));
    }
}
