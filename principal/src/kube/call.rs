//! One request of the core as one HTTP call. Bodies are bytes both ways.

use std::time::Duration;

use agent_core::informer::parse_status;
use agent_core::request::{Outcome, Request, Status, Verb};
use http::header::{ACCEPT, CONTENT_TYPE, RETRY_AFTER};
use http_body_util::{BodyExt as _, Limited};
use kube::Client;
use kube::client::Body;

/// Carries out what the core asks for. Never fails: that is an outcome too.
pub async fn execute(client: &Client, selector: &Selector, request: &Request) -> Outcome {
    let manager = "?fieldManager=argocd-agent";
    let path = request.key.path();
    let call = match &request.verb {
        Verb::Get => http::Request::get(selector.read(&request.key).unwrap_or(path)).body(Vec::new()),
        Verb::Create(body) => http::Request::post(format!("{}{manager}", request.key.collection_path()))
            .header(CONTENT_TYPE, "application/json")
            .body(body.clone()),
        Verb::CreateNamespace => http::Request::post(format!("/api/v1/namespaces{manager}"))
            .header(CONTENT_TYPE, "application/json")
            .body(Verb::namespace_body(&request.key.namespace)),
        Verb::JsonPatch(body) => http::Request::patch(format!("{path}{manager}"))
            .header(CONTENT_TYPE, "application/json-patch+json")
            .body(body.clone()),
        Verb::Delete { uid } => http::Request::delete(path)
            .header(CONTENT_TYPE, "application/json")
            .body(Verb::delete_options(uid)),
    };
    let call = match call {
        Ok(call) => call,
        // Names are checked before they come here; a call that cannot be written down was not made.
        Err(error) => return Outcome::Unknown(error.to_string()),
    };
    let outcome = match tokio::time::timeout(CALL_LIMIT, send(client, call)).await {
        Ok(outcome) => outcome,
        Err(_) => Outcome::Unknown(format!("no answer within {} s", CALL_LIMIT.as_secs())),
    };
    match (&request.verb, outcome) {
        (Verb::Get, Outcome::Done(body)) => selector.admit(body),
        (_, outcome) => outcome,
    }
}

async fn send(client: &Client, mut call: http::Request<Vec<u8>>) -> Outcome {
    call.headers_mut().insert(ACCEPT, http::HeaderValue::from_static("application/json"));
    let response = match client.send(call.map(Body::from)).await {
        Ok(response) => response,
        Err(error) => return Outcome::Unknown(explain_client(&error)),
    };
    let (head, body) = response.into_parts();
    match Limited::new(body, ANSWER_LIMIT).collect().await {
        Ok(body) => {
            let body = body.to_bytes();
            if head.status.is_success() {
                Outcome::Done(body.to_vec())
            } else {
                Outcome::Status(status(&head, &body))
            }
        }
        Err(error) => Outcome::Unknown(format!("the answer broke off: {error}")),
    }
}

/// The `Status` of an error answer, with what the header says about when to come again.
pub(crate) fn status(head: &http::response::Parts, body: &[u8]) -> Status {
    let mut status = parse_status(head.status.as_u16(), body);
    let after = head.headers.get(RETRY_AFTER).and_then(|value| value.to_str().ok()?.parse().ok());
    status.retry_after = status.retry_after.or(after.map(Duration::from_secs));
    status
}

/// The objects that are synchronised at all. What a read by name finds must pass the selector of the watch, or an
/// object that was excluded on purpose would come back through it.
#[derive(Clone, Debug)]
pub struct Selector {
    user: String,
}

impl Selector {
    /// With the user's `--label-selector`, which may be empty.
    pub fn new(user: &str) -> Self {
        Self { user: user.to_owned() }
    }

    /// The label selector of lists and watches.
    pub fn query(&self) -> String {
        agent_core::informer::selector(&self.user)
    }

    /// A selector of the user's can only be judged by the API server: the read becomes a list of one name.
    fn read(&self, key: &agent_core::request::Key) -> Option<String> {
        (!self.user.is_empty()).then(|| {
            format!(
                "{}?fieldSelector=metadata.name%3D{}&labelSelector={}",
                key.collection_path(),
                key.name,
                encode(&self.query())
            )
        })
    }

    fn admit(&self, body: Vec<u8>) -> Outcome {
        #[derive(serde::Deserialize)]
        struct List<'a> {
            #[serde(borrow)]
            items: Vec<&'a serde_json::value::RawValue>,
        }
        #[derive(serde::Deserialize)]
        struct Head {
            metadata: Metadata,
        }
        #[derive(serde::Deserialize)]
        struct Metadata {
            #[serde(default)]
            labels: Option<std::collections::HashMap<String, String>>,
        }
        let excluded = || {
            Outcome::Status(Status {
                code: 404,
                reason: "NotFound".to_owned(),
                message: "excluded by its labels".to_owned(),
                retry_after: None,
            })
        };
        if self.user.is_empty() {
            let ignored = serde_json::from_slice::<Head>(&body)
                .ok()
                .and_then(|head| head.metadata.labels)
                .is_some_and(|labels| labels.get(IGNORE_LABEL).is_some_and(|value| value == "true"));
            return if ignored { excluded() } else { Outcome::Done(body) };
        }
        match serde_json::from_slice::<List<'_>>(&body) {
            Ok(list) => list.items.first().map_or_else(excluded, |item| Outcome::Done(item.get().into())),
            Err(error) => Outcome::Unknown(format!("the answer is not a list: {error}")),
        }
    }
}

/// Percent-encodes a query value.
pub(crate) fn encode(text: &str) -> String {
    text.bytes()
        .map(|byte| match byte {
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'-' | b'.' | b'_' | b'~' => {
                char::from(byte).to_string()
            }
            other => format!("%{other:02X}"),
        })
        .collect()
}

/// A client error for a person: the API server's own words where it answered.
pub(crate) fn explain_client(error: &kube::Error) -> String {
    match error {
        kube::Error::Api(status) => status.message.clone(),
        other => explain(other),
    }
}

/// An error with its causes, each said once.
pub(crate) fn explain(error: &(dyn std::error::Error + 'static)) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(inner) = source {
        let inner_text = inner.to_string();
        if !text.contains(&inner_text) {
            text = format!("{text}: {inner_text}");
        }
        source = inner.source();
    }
    text
}

const IGNORE_LABEL: &str = "argocd-agent.argoproj-labs.io/ignore-sync";
/// The API server gives up on a call after 60 s; half of that leaves time to try again.
const CALL_LIMIT: Duration = Duration::from_secs(30);
/// etcd stores at most a few MiB; a larger answer is not an object.
const ANSWER_LIMIT: usize = 32 << 20;

#[cfg(test)]
mod tests {
    use super::*;
    use agent_core::request::{Key, Kind};

    #[test]
    fn excluded_objects_do_not_exist() {
        let plain = Selector::new("");
        assert_eq!(plain.query(), "argocd-agent.argoproj-labs.io/ignore-sync!=true");
        let admit = |labels: &str| {
            plain.admit(format!("{{\"metadata\":{{\"name\":\"a\",\"labels\":{labels}}}}}").into_bytes())
        };
        assert!(matches!(admit("null"), Outcome::Done(_)));
        assert!(matches!(admit("{\"x\":\"y\"}"), Outcome::Done(_)));
        let ignored = admit("{\"argocd-agent.argoproj-labs.io/ignore-sync\":\"true\"}");
        assert!(matches!(ignored, Outcome::Status(Status { code: 404, .. })));
    }

    #[test]
    fn a_users_selector_is_asked_of_the_api_server() {
        let selector = Selector::new("site in (a,b)");
        let path = selector.read(&Key::new(Kind::Application, "agent-1", "app")).unwrap();
        assert_eq!(
            path,
            "/apis/argoproj.io/v1alpha1/namespaces/agent-1/applications?fieldSelector=metadata.name%3Dapp\
             &labelSelector=argocd-agent.argoproj-labs.io%2Fignore-sync%21%3Dtrue%2Csite%20in%20%28a%2Cb%29"
        );
        assert_eq!(selector.admit(b"{\"items\":[{\"a\":1}]}".to_vec()), Outcome::Done(b"{\"a\":1}".to_vec()));
        assert!(matches!(selector.admit(b"{\"items\":[]}".to_vec()), Outcome::Status(_)));
        assert!(matches!(selector.admit(b"x".to_vec()), Outcome::Unknown(_)));
    }
}
