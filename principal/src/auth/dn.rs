//! The subject of a certificate as Go prints it: the regular expressions of `--auth mtls:` are written against that
//! text, so it must be the same to the byte.

use x509_parser::der_parser::asn1_rs::{Any, Tag};
use x509_parser::prelude::{FromDer, X509Certificate};
use x509_parser::x509::X509Name;

/// What authentication wants to know of a certificate.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CertificateNames {
    /// Subject in Go's form.
    pub subject: String,
    /// The last common name of the subject; empty if there is none.
    pub common_name: String,
    /// URI SANs in the certificate's order.
    pub uris: Vec<String>,
}

/// Reads a DER certificate.
pub fn names(der: &[u8]) -> Result<CertificateNames, String> {
    let (_, certificate) = X509Certificate::from_der(der).map_err(|error| error.to_string())?;
    let attributes = attributes(certificate.subject())?;
    let mut uris = Vec::new();
    if let Some(san) = certificate.subject_alternative_name().map_err(|error| error.to_string())? {
        for name in &san.value.general_names {
            if let x509_parser::extensions::GeneralName::URI(uri) = name {
                uris.push((*uri).to_owned());
            }
        }
    }
    let common_name = last(&attributes, COMMON_NAME).unwrap_or_default().to_owned();
    Ok(CertificateNames { subject: render(&attributes), common_name, uris })
}

/// An attribute's dotted OID and its text.
type Attribute = (String, String);

fn attributes(name: &X509Name<'_>) -> Result<Vec<Attribute>, String> {
    name.iter_attributes()
        .map(|attribute| Ok((attribute.attr_type().to_id_string(), text(attribute.attr_value())?)))
        .collect()
}

/// The string types that a subject may use.
fn text(value: &Any<'_>) -> Result<String, String> {
    let bytes = value.data;
    let utf8 = || String::from_utf8(bytes.to_vec()).map_err(|_| "subject is not valid text".to_owned());
    match value.tag() {
        Tag::Utf8String => utf8(),
        Tag::PrintableString | Tag::Ia5String | Tag::NumericString if bytes.is_ascii() => utf8(),
        // T.61 is read as Latin-1 by everyone.
        Tag::T61String => Ok(bytes.iter().map(|byte| char::from(*byte)).collect()),
        Tag::BmpString if bytes.len().is_multiple_of(2) => {
            let units: Vec<u16> =
                bytes.chunks_exact(2).map(|pair| u16::from_be_bytes([pair[0], pair[1]])).collect();
            let units = units.strip_suffix(&[0]).unwrap_or(&units);
            Ok(String::from_utf16_lossy(units))
        }
        tag => Err(format!("subject has a value of an unexpected type ({tag})")),
    }
}

fn last<'a>(attributes: &'a [Attribute], oid: &str) -> Option<&'a str> {
    attributes.iter().rev().find(|(kind, _)| kind == oid).map(|(_, value)| value.as_str())
}

fn render(attributes: &[Attribute]) -> String {
    let mut parts = Vec::new();
    for (oid, name, single) in STANDARD {
        if *single {
            if let Some(value) = last(attributes, oid).filter(|value| !value.is_empty()) {
                parts.push(format!("{name}={}", escape(value)));
            }
        } else {
            let values: Vec<String> = attributes
                .iter()
                .filter(|(kind, _)| kind == oid)
                .map(|(_, value)| format!("{name}={}", escape(value)))
                .collect();
            if !values.is_empty() {
                parts.push(values.join("+"));
            }
        }
    }
    for (oid, value) in attributes.iter().rev() {
        if !STANDARD.iter().any(|(standard, _, _)| standard == oid) {
            parts.push(format!("{oid}=#{}", hex_der(value)));
        }
    }
    parts.join(",")
}

fn escape(value: &str) -> String {
    let mut out = String::with_capacity(value.len());
    let end = value.chars().count().saturating_sub(1);
    for (position, c) in value.chars().enumerate() {
        let special = match c {
            ',' | '+' | '"' | '\\' | '<' | '>' | ';' => true,
            '#' => position == 0,
            ' ' => position == 0 || position == end,
            _ => false,
        };
        if special {
            out.push('\\');
        }
        out.push(c);
    }
    out
}

/// The value encoded again: PrintableString where its characters allow it, else UTF8String.
fn hex_der(value: &str) -> String {
    let printable = value.bytes().all(|b| b.is_ascii_alphanumeric() || b" '()+,-./:=?".contains(&b));
    let mut der = vec![if printable { 0x13 } else { 0x0c }];
    let length = value.len();
    if length < 0x80 {
        der.push(length as u8);
    } else {
        let bytes: Vec<u8> = length.to_be_bytes().into_iter().skip_while(|byte| *byte == 0).collect();
        der.push(0x80 | bytes.len() as u8);
        der.extend(bytes);
    }
    der.extend(value.bytes());
    der.iter().map(|byte| format!("{byte:02x}")).collect()
}

const COMMON_NAME: &str = "2.5.4.3";

/// The attributes that have names, in the order of print, and whether only the last value counts.
const STANDARD: &[(&str, &str, bool)] = &[
    ("2.5.4.5", "SERIALNUMBER", true),
    (COMMON_NAME, "CN", true),
    ("2.5.4.11", "OU", false),
    ("2.5.4.10", "O", false),
    ("2.5.4.17", "POSTALCODE", false),
    ("2.5.4.9", "STREET", false),
    ("2.5.4.7", "L", false),
    ("2.5.4.8", "ST", false),
    ("2.5.4.6", "C", false),
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lengths_above_127_take_the_long_form() {
        let long = "a".repeat(300);
        assert!(hex_der(&long).starts_with("1382012c6161"));
        assert_eq!(hex_der("a@b.c"), "0c056140622e63");
    }

    #[test]
    fn no_certificate_is_an_error() {
        assert!(names(b"").is_err());
        assert!(names(&[0x30, 0x82, 0xff, 0xff]).is_err());
    }
}
