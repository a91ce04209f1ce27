//! Drives the core's informer: one GET at a time, its bytes as they come.

use agent_core::informer::{Config, End, Event, Informer};
use agent_core::rand::Rng;
use agent_core::request::Kind;
use http_body_util::{BodyExt as _, Limited};
use kube::Client;
use kube::client::Body;

use super::call::{explain, explain_client, status};
use crate::clock::Clock;

/// Lists and watches objects of one kind until the future is dropped or, with `once`, the first list is complete.
pub async fn run(
    client: &Client,
    clock: Clock,
    kind: Kind,
    namespace: Option<&str>,
    label_selector: &str,
    once: bool,
    sink: &mut (dyn FnMut(Event<'_>) + Send),
) {
    let mut rng = Rng::new(crate::clock::seed());
    let mut informer = Informer::new(Config {
        kind,
        namespace: namespace.map(Into::into),
        label_selector: label_selector.into(),
        page_size: PAGE_SIZE,
        // Pages serve as well where memory is plenty, and a one-off list has no use for the watch after it.
        streaming_lists: false,
    });
    let mut body: Option<(u32, Body)> = None;
    loop {
        informer.handle_timeout(clock.now(), &mut rng);
        if let Some(note) = informer.poll_note() {
            if note.is_routine() {
                tracing::debug!("{note}");
            } else {
                tracing::warn!("{note}");
            }
        }
        if once && informer.has_synced() {
            return;
        }
        if let Some(fetch) = informer.poll_fetch(&mut rng) {
            body = None;
            let opened = open(client, &fetch.path);
            match with_deadline(&clock, &informer, opened).await {
                None => {}
                Some(Ok(answer)) => body = Some((fetch.id, answer)),
                Some(Err(end)) => informer.end(clock.now(), end, &mut rng, sink),
            }
            continue;
        }
        let Some((id, answer)) = body.as_mut().filter(|(id, _)| informer.fetching() == Some(*id)) else {
            body = None;
            match informer.poll_timeout() {
                Some(at) => clock.sleep_until(at).await,
                // The machine always waits for something.
                None => std::future::pending().await,
            }
            continue;
        };
        debug_assert_eq!(informer.fetching(), Some(*id));
        let Some(frame) = with_deadline(&clock, &informer, answer.frame()).await else { continue };
        match frame {
            Some(Ok(frame)) => {
                if let Some(bytes) = frame.data_ref() {
                    informer.receive(clock.now(), bytes, &mut rng, sink);
                }
            }
            Some(Err(error)) => {
                body = None;
                informer.end(clock.now(), End::Broken(explain(&error)), &mut rng, sink);
            }
            None => {
                body = None;
                informer.end(clock.now(), End::Finished, &mut rng, sink);
            }
        }
    }
}

/// `None`: the machine's deadline came first.
async fn with_deadline<F: Future>(clock: &Clock, informer: &Informer, future: F) -> Option<F::Output> {
    match informer.poll_timeout() {
        None => Some(future.await),
        Some(at) => tokio::select! {
            biased;
            output = future => Some(output),
            () = clock.sleep_until(at) => None,
        },
    }
}

async fn open(client: &Client, path: &str) -> Result<Body, End> {
    let request = http::Request::get(path)
        .header(http::header::ACCEPT, "application/json")
        .body(Body::empty())
        .map_err(|error| End::Broken(error.to_string()))?;
    let response = client.send(request).await.map_err(|error| End::Broken(explain_client(&error)))?;
    let (head, body) = response.into_parts();
    if head.status.is_success() {
        return Ok(body);
    }
    let body =
        Limited::new(body, ERROR_LIMIT).collect().await.map(|body| body.to_bytes()).unwrap_or_default();
    Err(End::Status(status(&head, &body)))
}

/// Objects in a page: about 6 MB of Applications, and few round trips for the largest hubs.
const PAGE_SIZE: u32 = 500;
/// A `Status` is small; what is longer is not one.
const ERROR_LIMIT: usize = 1 << 20;
