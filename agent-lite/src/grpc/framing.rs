//! Messages in a byte stream: one byte for compression, four for the length.

use std::fmt;

use bytes::Bytes;

use super::gzip;

/// Frames one message. With `compress`, those above [`COMPRESS_ABOVE`] are sent as gzip.
pub(super) fn encode(message: &[u8], compress: bool) -> Bytes {
    let mut frame = Vec::with_capacity(message.len() + PREFIX);
    if compress && message.len() > COMPRESS_ABOVE {
        frame.extend_from_slice(&[1, 0, 0, 0, 0]);
        gzip::compress(message, &mut frame);
    } else {
        frame.extend_from_slice(&[0; PREFIX]);
        frame.extend_from_slice(message);
    }
    let length = u32::try_from(frame.len() - PREFIX).unwrap_or(u32::MAX);
    frame[1..PREFIX].copy_from_slice(&length.to_be_bytes());
    frame.into()
}

/// Cuts a byte stream into messages.
#[derive(Debug)]
pub(super) struct Decoder {
    limit: usize,
    buffer: Vec<u8>,
    /// The peer's `grpc-encoding` is gzip.
    gzip: bool,
}

/// Why the stream cannot be read any further.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) enum FramingError {
    TooLarge { length: usize, limit: usize },
    UnknownCompression,
    BrokenGzip,
}

impl fmt::Display for FramingError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::TooLarge { length, limit } => {
                write!(f, "a message of {length} bytes is above --grpc-max-message-size {limit}")
            }
            Self::UnknownCompression => f.write_str("a compressed message, but the encoding is not gzip"),
            Self::BrokenGzip => f.write_str("a message with broken gzip"),
        }
    }
}

impl Decoder {
    pub(super) const fn new(limit: usize, gzip: bool) -> Self {
        Self { limit, buffer: Vec::new(), gzip }
    }

    /// Takes bytes in.
    pub(super) fn push(&mut self, bytes: &[u8]) {
        self.buffer.extend_from_slice(bytes);
    }

    /// The next whole message. The length is checked as soon as it is known, before the message is held.
    pub(super) fn next(&mut self) -> Result<Option<Vec<u8>>, FramingError> {
        let Some((prefix, rest)) = self.buffer.split_first_chunk::<PREFIX>() else { return Ok(None) };
        let [compressed, length @ ..] = *prefix;
        let length = u32::from_be_bytes(length) as usize;
        if length > self.limit {
            return Err(FramingError::TooLarge { length, limit: self.limit });
        }
        let Some(body) = rest.get(..length) else { return Ok(None) };
        let message = match compressed {
            0 => body.to_vec(),
            _ if self.gzip => self.inflate(body)?,
            _ => return Err(FramingError::UnknownCompression),
        };
        self.buffer.drain(..PREFIX + length);
        // A burst's buffer is given back.
        if self.buffer.is_empty() && self.buffer.capacity() > KEPT_BUFFER {
            self.buffer = Vec::new();
        }
        Ok(Some(message))
    }

    /// Whether a message has begun and not ended.
    pub(super) fn is_between(&self) -> bool {
        !self.buffer.is_empty()
    }

    fn inflate(&self, body: &[u8]) -> Result<Vec<u8>, FramingError> {
        match gzip::decompress(body, self.limit) {
            Ok(message) => Ok(message),
            Err(gzip::Error::TooLarge) => {
                Err(FramingError::TooLarge { length: self.limit + 1, limit: self.limit })
            }
            Err(gzip::Error::Broken) => Err(FramingError::BrokenGzip),
        }
    }
}

const PREFIX: usize = 5;

/// Below a kilobyte gzip saves less than it costs.
const COMPRESS_ABOVE: usize = 1024;

const KEPT_BUFFER: usize = 16 << 10;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn any_cut_gives_the_same_messages() {
        let messages = [vec![], b"one".to_vec(), vec![7; 3000]];
        for compress in [false, true] {
            let stream: Vec<u8> = messages.iter().flat_map(|m| encode(m, compress).to_vec()).collect();
            for size in [1, 2, 7, 100, 10_000] {
                let mut decoder = Decoder::new(3000, true);
                let mut got = Vec::new();
                for chunk in stream.chunks(size) {
                    decoder.push(chunk);
                    while let Some(message) = decoder.next().unwrap() {
                        got.push(message);
                    }
                }
                assert_eq!(got, messages);
                assert!(!decoder.is_between());
            }
            assert_eq!(compress, stream.len() < 3000);
        }
    }

    #[test]
    fn limits_hold_before_the_message_is_there() {
        let mut decoder = Decoder::new(10, true);
        decoder.push(&[0, 0xff, 0, 0, 0]);
        assert!(matches!(decoder.next(), Err(FramingError::TooLarge { limit: 10, .. })));
        // A small frame that inflates to a large one.
        let mut decoder = Decoder::new(2000, true);
        decoder.push(&encode(&[0; 100_000], true));
        assert_eq!(decoder.next(), Err(FramingError::TooLarge { length: 2001, limit: 2000 }));
    }

    #[test]
    fn broken_frames_are_named() {
        let mut decoder = Decoder::new(10, true);
        decoder.push(&[1, 0, 0, 0, 2, 9, 9]);
        assert_eq!(decoder.next(), Err(FramingError::BrokenGzip));
        let mut decoder = Decoder::new(10, false);
        decoder.push(&[1, 0, 0, 0, 0]);
        assert_eq!(decoder.next(), Err(FramingError::UnknownCompression));
    }
}
