//! How a call ended: trailers, HTTP status, stream errors.

use agent_core::session::{Failure, code};
use http::{HeaderMap, StatusCode};

/// The status in trailers (or in the headers of an answer without a body); `None` if there is none.
pub(super) fn from_headers(headers: &HeaderMap) -> Option<Failure> {
    let status = headers.get("grpc-status")?;
    let number = status.to_str().ok().and_then(|text| text.parse().ok()).unwrap_or(code::UNKNOWN);
    let message = headers.get("grpc-message").map(|text| percent_decode(text.as_bytes())).unwrap_or_default();
    Some(Failure::status(number, message))
}

/// An answer that is not gRPC, by the mapping of the gRPC specification.
pub(super) fn from_http(status: StatusCode) -> Failure {
    let number = match status.as_u16() {
        400 => code::INTERNAL,
        401 => code::UNAUTHENTICATED,
        403 => code::PERMISSION_DENIED,
        404 => code::UNIMPLEMENTED,
        429 | 502 | 503 | 504 => code::UNAVAILABLE,
        _ => code::UNKNOWN,
    };
    Failure::status(number, format!("HTTP {status} instead of gRPC"))
}

/// A broken stream or connection.
pub(super) fn from_h2(error: &h2::Error) -> Failure {
    let (what, reason) = match error.reason() {
        Some(reason) if error.is_go_away() => ("the peer closed the connection (GOAWAY)", reason),
        Some(reason) if error.is_reset() => ("stream reset", reason),
        _ => return broken(error),
    };
    let number = match reason {
        h2::Reason::REFUSED_STREAM | h2::Reason::NO_ERROR => code::UNAVAILABLE,
        h2::Reason::CANCEL => code::CANCELLED,
        h2::Reason::ENHANCE_YOUR_CALM => code::RESOURCE_EXHAUSTED,
        _ => code::INTERNAL,
    };
    Failure::status(number, format!("{what}: {reason:?}"))
}

fn broken(error: &h2::Error) -> Failure {
    match error.get_io() {
        Some(io) => {
            let (text, clock) = crate::net::tls_error(io);
            Failure { clock, ..Failure::transport(format!("connection lost: {text}")) }
        }
        None => Failure::transport(format!("connection lost: {error}")),
    }
}

/// `grpc-message`: percent-encoded UTF-8; what is broken stays as it is. Bounded, since it goes into a log line.
fn percent_decode(text: &[u8]) -> String {
    let mut out = Vec::with_capacity(text.len().min(MAX_MESSAGE));
    let mut at = 0;
    while at < text.len() && out.len() < MAX_MESSAGE {
        let digits = text.get(at + 1..at + 3).and_then(|digits| std::str::from_utf8(digits).ok());
        match digits.and_then(|digits| u8::from_str_radix(digits, 16).ok()) {
            Some(byte) if text[at] == b'%' => {
                out.push(byte);
                at += 3;
            }
            _ => {
                out.push(text[at]);
                at += 1;
            }
        }
    }
    String::from_utf8_lossy(&out).into_owned()
}

const MAX_MESSAGE: usize = 1024;

#[cfg(test)]
mod tests {
    use super::*;
    use http::HeaderValue;

    #[test]
    fn trailers() {
        let mut headers = HeaderMap::new();
        assert_eq!(from_headers(&headers), None);
        headers.insert("grpc-status", HeaderValue::from_static("9"));
        headers.insert("grpc-message", HeaderValue::from_static("version%20mismatch %zz%"));
        assert_eq!(from_headers(&headers), Some(Failure::status(9, "version mismatch %zz%")));
        headers.insert("grpc-status", HeaderValue::from_static("many"));
        assert_eq!(from_headers(&headers).unwrap().code, Some(code::UNKNOWN));
    }

    #[test]
    fn answers_of_other_servers() {
        assert_eq!(from_http(StatusCode::NOT_FOUND).code, Some(code::UNIMPLEMENTED));
        assert_eq!(from_http(StatusCode::BAD_GATEWAY).code, Some(code::UNAVAILABLE));
    }
}
