//! Subscribe, the main channel.

use std::sync::Arc;

use agent_core::peer::Peer;
use bytes::Bytes;
use http::{Request, Response};
use hyper::body::Incoming;
use tonic::body::Body;
use tonic::server::StreamingService;
use tonic::{Status, Streaming};

use super::codec::Frames;
use super::{Connection, Services};
use crate::hub::{Agent, AgentStream, Session};

pub(super) async fn subscribe(
    services: Arc<Services>,
    connection: Arc<Connection>,
    request: Request<Incoming>,
) -> Response<Body> {
    let mut grpc = services.grpc(Frames, &request, services.max_message);
    grpc.streaming(Subscribe { services, connection }, request).await
}

struct Subscribe {
    services: Arc<Services>,
    connection: Arc<Connection>,
}

impl StreamingService<Bytes> for Subscribe {
    type Response = Vec<u8>;
    type ResponseStream = AgentStream;
    type Future =
        std::pin::Pin<Box<dyn Future<Output = Result<tonic::Response<AgentStream>, Status>> + Send>>;

    fn call(&mut self, request: tonic::Request<Streaming<Bytes>>) -> Self::Future {
        let (services, connection) = (self.services.clone(), self.connection.clone());
        Box::pin(async move { open(services, &connection, request).await })
    }
}

async fn open(
    services: Arc<Services>,
    connection: &Connection,
    request: tonic::Request<Streaming<Bytes>>,
) -> Result<tonic::Response<AgentStream>, Status> {
    let identity = services.authorize(connection, request.metadata()).await?;
    let name = identity.client_id;
    if identity.mode != "managed" {
        tracing::warn!(agent = name, "agent is autonomous: this version serves managed agents only");
        services.hold().await;
        return Err(Status::unauthenticated("autonomous agents are not served"));
    }
    let authenticated = services.versions.recall(&name).unwrap_or_default();
    let namespace = authenticated.namespace.clone();
    let peer = Peer { namespace, ..Services::peer_of(request.metadata()).unwrap_or(authenticated) };
    let session = Session {
        peer,
        fingerprint: connection.fingerprint().to_owned(),
        address: connection.address.clone(),
    };
    let Some((agent, stream)) = services.hub.connect(&name, session) else {
        return Err(Status::unavailable("the principal stops"));
    };
    tokio::spawn(receive(services.clone(), agent, stream.slot(), request.into_inner()));
    let mut response = tonic::Response::new(stream);
    services.introduce(response.metadata_mut());
    Ok(response)
}

/// The receiving half. It ends with the stream: when the agent hangs up, the connection breaks, or we end it.
async fn receive(
    services: Arc<Services>,
    agent: Arc<Agent>,
    slot: Arc<crate::hub::Slot>,
    mut messages: Streaming<Bytes>,
) {
    loop {
        slot.ready().await;
        let message = tokio::select! {
            message = messages.message() => message,
            () = slot.ended() => break,
        };
        match message {
            Ok(Some(message)) => {
                if message.len() >= services.max_message / 5 * 4 {
                    tracing::warn!(
                        agent = agent.name(),
                        bytes = message.len(),
                        "message is close to --grpc-max-message-size"
                    );
                }
                if !agent.receive(&slot, &message) {
                    break;
                }
            }
            Ok(None) => break,
            Err(status) => {
                tracing::debug!(agent = agent.name(), "stream broke: {status}");
                break;
            }
        }
    }
    services.hub.disconnect(&agent, &slot);
}
