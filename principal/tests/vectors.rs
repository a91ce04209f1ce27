//! Tokens and certificate names against data recorded from the reference.

use std::path::PathBuf;
use std::time::{Duration, UNIX_EPOCH};

use principal::auth::{Evidence, Method, dn};
use principal::issuer::{Audience, Identity, Issuer};
use serde_json::Value;

fn document(name: &str) -> Value {
    let directory = std::env::var_os("VECTORS_DIR")
        .map_or_else(|| PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../tests/vectors"), PathBuf::from);
    let path = directory.join(name);
    let text = std::fs::read(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    serde_json::from_slice(&text).unwrap()
}

fn text<'a>(case: &'a Value, key: &str) -> &'a str {
    case[key].as_str().unwrap_or_else(|| panic!("{} has no {key}", case["id"]))
}

fn unhex(text: &str) -> Vec<u8> {
    (0..text.len()).step_by(2).map(|at| u8::from_str_radix(&text[at..at + 2], 16).unwrap()).collect()
}

fn audience(kind: &str) -> Audience {
    match kind {
        "access" => Audience::Access,
        "refresh" => Audience::Refresh,
        "resource-proxy" => Audience::ResourceProxy,
        other => panic!("unknown kind {other}"),
    }
}

#[test]
fn tokens() {
    let document = document("jwt.json");
    let issuer = Issuer::from_pem(document["private_key_pkcs8_pem"].as_str().unwrap()).unwrap();
    let mut count = 0;
    for case in document["cases"].as_array().unwrap() {
        let id = text(case, "id");
        match text(case, "sub") {
            "issued" => issued(&issuer, case),
            "verify" => verify(&issuer, case),
            "boundary" => {
                let nanos = case["now_unix_nanos"].as_u64().unwrap();
                let now = UNIX_EPOCH + Duration::from_nanos(nanos);
                let result = issuer.verify(text(case, "token"), Audience::Access, now);
                assert_eq!(text(case, "audience"), Audience::Access.as_str());
                assert_eq!(result.is_ok(), case["valid"].as_bool().unwrap(), "{id}: {result:?}");
            }
            other => panic!("{id}: unknown sub-kind {other}"),
        }
        count += 1;
    }
    assert!(count > 40);
}

fn issued(issuer: &Issuer, case: &Value) {
    let inputs = &case["inputs"];
    let claims: Value = serde_json::from_str(text(case, "claims_json")).unwrap();
    let lifetime =
        claims["exp"].as_u64().map(|exp| Duration::from_secs(exp - claims["iat"].as_u64().unwrap()));
    let now = UNIX_EPOCH + Duration::from_secs(claims["iat"].as_u64().unwrap());
    let token = issuer
        .issue(
            audience(text(inputs, "kind")),
            text(inputs, "subject"),
            lifetime,
            now,
            claims["jti"].as_str().unwrap(),
        )
        .unwrap();
    assert_eq!(token, text(case, "token"), "{}", case["id"]);
}

fn verify(issuer: &Issuer, case: &Value) {
    // "All verdicts hold at any time between 2026-12 and 2098."
    let now = UNIX_EPOCH + Duration::from_secs(1_900_000_000);
    for (kind, verdict) in case["verdict_now"].as_object().unwrap() {
        let at = format!("{} {kind}", case["id"]);
        let result = issuer.verify(text(case, "token"), audience(kind), now);
        assert_eq!(result.is_ok(), verdict["valid"].as_bool().unwrap(), "{at}: {result:?}");
        let Ok(verified) = result else { continue };
        if let Some(subject) = verdict["subject"].as_str() {
            assert_eq!(verified.subject, subject, "{at}");
        }
        if kind == "resource-proxy" {
            continue;
        }
        let identity = Identity::parse(&verified.subject);
        if verdict["client_id_error"].is_string() {
            assert!(identity.is_err(), "{at}: {identity:?}");
        } else if let Some(client_id) = verdict["client_id"].as_str() {
            let identity = identity.unwrap_or_else(|error| panic!("{at}: {error}"));
            assert_eq!(identity.client_id, client_id, "{at}");
            assert_eq!(identity.mode, verdict["mode"].as_str().unwrap_or_default(), "{at}");
        }
    }
}

#[test]
fn names() {
    let document = document("dn.json");
    let credentials = std::collections::BTreeMap::new();
    let mut count = 0;
    for case in document["cases"].as_array().unwrap() {
        let id = text(case, "id");
        let sub = text(case, "sub");
        let der = case["certificate_der_hex"].as_str().map(unhex);
        if sub == "subject" {
            let names = dn::names(der.as_deref().unwrap()).unwrap();
            assert_eq!(names.subject, text(case, "subject"), "{id}");
            assert_eq!(names.common_name, text(case, "common_name"), "{id}");
            let fingerprint = principal::tls::fingerprint(der.as_deref().unwrap());
            assert_eq!(fingerprint, text(case, "fingerprint"), "{id}");
        }
        if sub == "uri" {
            let uris: Vec<&str> =
                case["uris"].as_array().into_iter().flatten().filter_map(Value::as_str).collect();
            assert_eq!(dn::names(der.as_deref().unwrap()).unwrap().uris, uris, "{id}");
        }
        let extractions = case["extractions"].as_array().cloned().unwrap_or_else(|| vec![case.clone()]);
        for extraction in &extractions {
            let regex = text(extraction, "regex");
            let auth = match sub {
                "subject" => format!("mtls:subject:{regex}"),
                "uri" => format!("mtls:uri:{regex}"),
                "header" => format!("header:x-id:{regex}"),
                other => panic!("{id}: unknown sub-kind {other}"),
            };
            let method = Method::parse(&auth, sub == "header", &mut Vec::new()).unwrap();
            let evidence = Evidence {
                certificate: der.as_deref(),
                header: case["header_value"].as_str(),
                credentials: &credentials,
            };
            let agent = method.identify(&evidence).ok();
            assert_eq!(agent.as_deref(), extraction["agent"].as_str(), "{id} {regex}");
            count += 1;
        }
    }
    assert!(count > 100, "{count}");
}
