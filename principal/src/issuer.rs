//! Tokens: RS512 JWTs with exactly the claims of the reference.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use jsonwebtoken::{Algorithm, DecodingKey, EncodingKey};
use serde::{Deserialize, Serialize};

/// What a token may be used for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Audience {
    /// Every call but authentication.
    Access,
    /// RefreshToken.
    Refresh,
    /// The resource proxy; its tokens never expire and their subject is the plain agent name.
    ResourceProxy,
}

impl Audience {
    /// The one string in `aud`.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Access => "argocd-agent-server-access",
            Self::Refresh => "argocd-agent-server-refresh",
            Self::ResourceProxy => "argocd-agent-server-resource-proxy",
        }
    }
}

/// Signs and verifies.
pub struct Issuer {
    signing: EncodingKey,
    verifying: DecodingKey,
}

impl std::fmt::Debug for Issuer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Issuer")
    }
}

/// A verified token.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Verified {
    /// `sub`; empty if absent.
    pub subject: String,
    /// `exp` in whole seconds since the epoch, if there is one.
    pub expires: Option<u64>,
}

/// The identity inside the subject of access and refresh tokens.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Identity {
    /// The agent's name.
    pub client_id: String,
    /// `managed` or `autonomous` in a good token.
    pub mode: String,
}

impl Issuer {
    /// From an RSA private key, PKCS#8 in PEM.
    pub fn from_pem(pem: &str) -> Result<Self, String> {
        let signing = EncodingKey::from_rsa_pem(pem.as_bytes())
            .map_err(|error| format!("not an RSA private key in PKCS#8 PEM: {error}"))?;
        let key =
            rcgen::KeyPair::from_pem(pem).map_err(|error| format!("not an RSA private key: {error}"))?;
        // The raw public key of an RSA pair is the PKCS#1 structure that the verifier wants.
        let verifying = DecodingKey::from_rsa_der(key.public_key_raw());
        let issuer = Self { signing, verifying };
        // A key that cannot sign shows now and not at the first agent.
        issuer.sign(b"probe").map(|_| issuer)
    }

    /// A new token. `jti` is a random UUID; `lifetime` is absent for resource-proxy tokens.
    pub fn issue(
        &self,
        audience: Audience,
        subject: &str,
        lifetime: Option<Duration>,
        now: SystemTime,
        jti: &str,
    ) -> Result<String, String> {
        let now = now.duration_since(UNIX_EPOCH).map_err(|_| "the clock is before 1970")?.as_secs();
        let claims = Claims {
            iss: ISSUER,
            sub: subject,
            aud: [audience.as_str()],
            exp: lifetime.map(|lifetime| now + lifetime.as_secs()),
            nbf: now,
            iat: now,
            jti,
        };
        let claims = serde_json::to_vec(&claims).map_err(|error| error.to_string())?;
        let message = format!("{}.{}", URL_SAFE_NO_PAD.encode(HEADER), URL_SAFE_NO_PAD.encode(claims));
        let signature = self.sign(message.as_bytes())?;
        Ok(format!("{message}.{signature}"))
    }

    /// Checks signature, algorithm, issuer, audience and times, without any leeway.
    pub fn verify(&self, token: &str, audience: Audience, now: SystemTime) -> Result<Verified, String> {
        let mut parts = token.split('.');
        let (Some(header), Some(payload), Some(signature), None) =
            (parts.next(), parts.next(), parts.next(), parts.next())
        else {
            return Err("not three segments".to_owned());
        };
        let decode = |segment: &str| URL_SAFE_NO_PAD.decode(segment).map_err(|_| "not base64url".to_owned());
        let header: Header = parse(&decode(header)?)?;
        if header.alg != "RS512" {
            return Err(format!("algorithm {:?} is not RS512", header.alg));
        }
        let message = &token[..token.len() - signature.len() - 1];
        let good =
            jsonwebtoken::crypto::verify(signature, message.as_bytes(), &self.verifying, Algorithm::RS512)
                .map_err(|error| error.to_string())?;
        if !good {
            return Err("wrong signature".to_owned());
        }
        let claims: Received = parse(&decode(payload)?)?;
        if claims.iss.as_deref() != Some(ISSUER) {
            return Err("wrong issuer".to_owned());
        }
        let meant = match &claims.aud {
            Some(OneOrMany::One(one)) => one == audience.as_str(),
            Some(OneOrMany::Many(many)) => many.iter().any(|one| one == audience.as_str()),
            None => false,
        };
        if !meant {
            return Err("wrong audience".to_owned());
        }
        let now = now.duration_since(UNIX_EPOCH).map_err(|_| "the clock is before 1970")?;
        // Times may have fractions, which the reference cuts to whole seconds.
        let seconds = |time: Option<f64>| time.map(|time| Duration::from_secs(time.max(0.0) as u64));
        if seconds(claims.exp).is_some_and(|exp| now >= exp) {
            return Err("expired".to_owned());
        }
        if seconds(claims.nbf).is_some_and(|nbf| now < nbf) {
            return Err("not valid yet".to_owned());
        }
        Ok(Verified {
            subject: claims.sub.unwrap_or_default(),
            expires: seconds(claims.exp).map(|exp| exp.as_secs()),
        })
    }

    fn sign(&self, message: &[u8]) -> Result<String, String> {
        jsonwebtoken::crypto::sign(message, &self.signing, Algorithm::RS512)
            .map_err(|error| format!("the key cannot sign with RS512: {error}"))
    }
}

impl Identity {
    /// The JSON of `sub`, keys in this order.
    pub fn to_subject(&self) -> String {
        // Two strings cannot fail to encode.
        let text = |value: &str| serde_json::to_string(value).unwrap_or_default();
        format!("{{\"clientID\":{},\"mode\":{}}}", text(&self.client_id), text(&self.mode))
    }

    /// Reads `sub`. Key case does not count, other keys are ignored, as in Go.
    pub fn parse(subject: &str) -> Result<Self, String> {
        let object: serde_json::Map<String, serde_json::Value> =
            serde_json::from_str(subject).map_err(|error| format!("subject: {error}"))?;
        let field = |name: &str| match object.iter().rfind(|(key, _)| key.eq_ignore_ascii_case(name)) {
            None | Some((_, serde_json::Value::Null)) => Ok(String::new()),
            Some((_, serde_json::Value::String(text))) => Ok(text.clone()),
            Some(_) => Err(format!("subject: {name} is not text")),
        };
        Ok(Self { client_id: field("clientID")?, mode: field("mode")? })
    }
}

fn parse<'a, T: Deserialize<'a>>(json: &'a [u8]) -> Result<T, String> {
    serde_json::from_slice(json).map_err(|error| format!("not a token: {error}"))
}

#[derive(Serialize)]
struct Claims<'a> {
    iss: &'a str,
    sub: &'a str,
    aud: [&'a str; 1],
    #[serde(skip_serializing_if = "Option::is_none")]
    exp: Option<u64>,
    nbf: u64,
    iat: u64,
    jti: &'a str,
}

#[derive(Deserialize)]
struct Header {
    alg: String,
}

#[derive(Deserialize)]
struct Received {
    iss: Option<String>,
    sub: Option<String>,
    aud: Option<OneOrMany>,
    exp: Option<f64>,
    nbf: Option<f64>,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum OneOrMany {
    One(String),
    Many(Vec<String>),
}

/// `iss` of every token.
const ISSUER: &str = "argocd-agent-server";
/// The order of keys is the reference's; some parsers of tokens are text tools.
const HEADER: &str = r#"{"alg":"RS512","typ":"JWT"}"#;
