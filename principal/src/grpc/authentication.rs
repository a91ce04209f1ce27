//! Authenticate and RefreshToken.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use agent_core::request::is_dns_label;
use proto::auth::{AuthRequest, AuthResponse, RefreshTokenRequest};
use tonic::{Request, Response, Status};

use super::{Connection, Services};
use crate::auth::Evidence;
use crate::issuer::{Audience, Identity};

impl Services {
    /// The checks come in the reference's order; agents can rely on it.
    pub(super) async fn authenticate(
        &self,
        connection: &Connection,
        request: Request<AuthRequest>,
    ) -> Result<Response<AuthResponse>, Status> {
        let header = self
            .method
            .header()
            .and_then(|name| request.metadata().get(name)?.to_str().ok().map(String::from));
        let (metadata, _, message) = request.into_parts();
        let mode = message.mode.as_str();
        if !matches!(mode, "managed" | "autonomous") {
            return Err(Status::unknown(format!("unknown mode {mode:?}")));
        }
        let failed = |reason: &str| {
            tracing::warn!(address = connection.address, "authentication failed: {reason}");
            Status::unauthenticated("authentication failed")
        };
        if message.method != self.method.name() {
            return Err(failed(&format!(
                "the agent uses method {:?}, --auth says {:?}",
                message.method,
                self.method.name()
            )));
        }
        let evidence = Evidence {
            certificate: connection.certificate.as_ref().map(|certificate| certificate.der.as_slice()),
            header: header.as_deref(),
            credentials: &message.credentials,
        };
        // bcrypt takes tens of milliseconds of processor time on purpose.
        let identified = tokio::task::block_in_place(|| self.method.identify(&evidence));
        let name = identified.map_err(|reason| failed(&reason))?;
        match self.blocklist.has(connection.fingerprint()).await {
            Ok(false) => {}
            Ok(true) => {
                return Err(failed(&format!(
                    "certificate {} of agent {name} is on the blocklist",
                    connection.fingerprint()
                )));
            }
            Err(error) => {
                tracing::warn!("{error}");
                return Err(Status::unavailable("the blocklist cannot be read"));
            }
        }
        // The reference finds this out at the first call after authentication, and the agent comes back at once.
        self.check_subject(connection, &name).map_err(|reason| failed(&reason))?;
        if name == self.namespace {
            // The reference issues tokens and then refuses every call with them, ten times a second.
            return Err(failed(&format!(
                "agent {name:?} is named like the principal's namespace: rename it"
            )));
        }
        if message.version.is_empty() {
            self.hold().await;
            return Err(Status::invalid_argument("agent version is required"));
        }
        if mode == "autonomous" {
            return Err(failed(&format!(
                "agent {name} is autonomous: this version serves managed agents only"
            )));
        }
        tracing::info!(
            agent = name,
            version = message.version,
            ours = Self::peer_of(&metadata).is_some(),
            fingerprint = connection.fingerprint(),
            address = connection.address,
            "agent authenticated"
        );
        let namespace = if is_dns_label(&message.agent_namespace) { &*message.agent_namespace } else { "" };
        self.versions.remember(&name, &message.version, namespace);
        let subject = Identity { client_id: name, mode: message.mode }.to_subject();
        let issue = |audience, lifetime| {
            self.issuer
                .issue(audience, &subject, Some(lifetime), SystemTime::now(), &crate::clock::uuid())
                .map_err(|error| failed(&error))
        };
        let mut response = Response::new(AuthResponse {
            access_token: issue(Audience::Access, ACCESS_LIFETIME)?,
            refresh_token: issue(Audience::Refresh, REFRESH_LIFETIME)?,
            version: crate::version::VERSION.to_owned(),
            principal_namespace: self.namespace.clone(),
        });
        self.introduce(response.metadata_mut());
        Ok(response)
    }

    /// A new access token, and a new refresh token when the one shown is about to end.
    pub(super) fn refresh(
        &self,
        request: &Request<RefreshTokenRequest>,
    ) -> Result<Response<AuthResponse>, Status> {
        let failed = |reason: String| {
            tracing::warn!("token not refreshed: {reason}");
            Status::unauthenticated("authentication failed")
        };
        let now = SystemTime::now();
        let verified =
            self.issuer.verify(&request.get_ref().refresh_token, Audience::Refresh, now).map_err(failed)?;
        let identity = Identity::parse(&verified.subject).map_err(Status::unknown)?;
        let subject = identity.to_subject();
        let issue = |audience, lifetime| {
            self.issuer.issue(audience, &subject, Some(lifetime), now, &crate::clock::uuid()).map_err(failed)
        };
        let seconds = now.duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
        let left = verified.expires.map(|expires| Duration::from_secs(expires.saturating_sub(seconds)));
        let refresh_token = if left.is_some_and(|left| left < REFRESH_RENEWED_BELOW) {
            issue(Audience::Refresh, REFRESH_LIFETIME)?
        } else {
            String::new()
        };
        Ok(Response::new(AuthResponse {
            access_token: issue(Audience::Access, ACCESS_LIFETIME)?,
            refresh_token,
            version: String::new(),
            principal_namespace: String::new(),
        }))
    }
}

/// Lifetimes of the reference; agents refresh when 30 s are left.
const ACCESS_LIFETIME: Duration = Duration::from_secs(5 * 60);
const REFRESH_LIFETIME: Duration = Duration::from_secs(24 * 3600);
const REFRESH_RENEWED_BELOW: Duration = Duration::from_secs(10 * 60);
