//! gzip (RFC 1952) of one message: a fixed header, deflate, a check sum and a length.

use miniz_oxide::deflate::compress_to_vec;
use miniz_oxide::inflate::{TINFLStatus, decompress_to_vec_with_limit};

/// Why something cannot be unpacked.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Error {
    TooLarge,
    Broken,
}

/// Appends the gzip of `data`.
pub(super) fn compress(data: &[u8], out: &mut Vec<u8>) {
    // Deflate, no flags, no time, no hint, unknown system.
    out.extend_from_slice(&[0x1f, 0x8b, 8, 0, 0, 0, 0, 0, 0, 255]);
    out.extend_from_slice(&compress_to_vec(data, LEVEL));
    out.extend_from_slice(&crc32(data).to_le_bytes());
    out.extend_from_slice(&length_of(data));
}

/// Unpacks one gzip member of at most `limit` bytes.
pub(super) fn decompress(data: &[u8], limit: usize) -> Result<Vec<u8>, Error> {
    let body = skip_header(data).ok_or(Error::Broken)?;
    let (body, trailer) = body.split_last_chunk::<8>().ok_or(Error::Broken)?;
    let out = decompress_to_vec_with_limit(body, limit).map_err(|error| match error.status {
        TINFLStatus::HasMoreOutput => Error::TooLarge,
        _ => Error::Broken,
    })?;
    let mut expected = [0; 8];
    expected[..4].copy_from_slice(&crc32(&out).to_le_bytes());
    expected[4..].copy_from_slice(&length_of(&out));
    if *trailer == expected { Ok(out) } else { Err(Error::Broken) }
}

fn skip_header(data: &[u8]) -> Option<&[u8]> {
    let (header, mut rest) = data.split_first_chunk::<10>()?;
    let [0x1f, 0x8b, 8, flags, ..] = *header else { return None };
    if flags & EXTRA != 0 {
        let (length, after) = rest.split_first_chunk::<2>()?;
        rest = after.get(usize::from(u16::from_le_bytes(*length))..)?;
    }
    for flag in [NAME, COMMENT] {
        if flags & flag != 0 {
            rest = &rest[rest.iter().position(|byte| *byte == 0)? + 1..];
        }
    }
    if flags & HEADER_CRC != 0 {
        rest = rest.get(2..)?;
    }
    Some(rest)
}

/// The length modulo 2^32.
fn length_of(data: &[u8]) -> [u8; 4] {
    (data.len() as u32).to_le_bytes()
}

/// Four bits at a time: 64 bytes of table; messages are small and links slow.
fn crc32(data: &[u8]) -> u32 {
    const TABLE: [u32; 16] = {
        let mut table = [0; 16];
        let mut at = 0;
        while at < 16 {
            let mut value = at as u32;
            let mut bit = 0;
            while bit < 4 {
                value = if value & 1 == 1 { value >> 1 ^ 0xedb8_8320 } else { value >> 1 };
                bit += 1;
            }
            table[at] = value;
            at += 1;
        }
        table
    };
    !data.iter().fold(!0, |crc, byte| {
        let crc = crc ^ u32::from(*byte);
        let crc = crc >> 4 ^ TABLE[(crc & 15) as usize];
        crc >> 4 ^ TABLE[(crc & 15) as usize]
    })
}

const EXTRA: u8 = 4;
const NAME: u8 = 8;
const COMMENT: u8 = 16;
const HEADER_CRC: u8 = 2;

/// JSON shrinks to about a fifth at any level; higher ones cost time on small CPUs.
const LEVEL: u8 = 4;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn check_sums() {
        assert_eq!(crc32(b"123456789"), 0xcbf4_3926);
        assert_eq!(crc32(b""), 0);
    }

    #[test]
    fn what_is_packed_is_unpacked() {
        for data in [&b""[..], b"hello", &[7; 100_000]] {
            let mut packed = Vec::new();
            compress(data, &mut packed);
            assert_eq!(decompress(&packed, 100_000).as_deref(), Ok(data));
        }
    }

    #[test]
    fn every_optional_header_field() {
        let mut packed = Vec::new();
        compress(b"hello", &mut packed);
        let mut with_fields = packed[..10].to_vec();
        with_fields[3] = EXTRA | NAME | COMMENT | HEADER_CRC;
        with_fields.extend_from_slice(b"\x02\x00xxname\0comment\0cc");
        with_fields.extend_from_slice(&packed[10..]);
        assert_eq!(decompress(&with_fields, 10).as_deref(), Ok(&b"hello"[..]));
        for cut in 0..with_fields.len() {
            assert!(decompress(&with_fields[..cut], 10).is_err());
        }
    }

    #[test]
    fn limits_and_check_sums_hold() {
        let mut packed = Vec::new();
        compress(&[0; 1000], &mut packed);
        assert_eq!(decompress(&packed, 999), Err(Error::TooLarge));
        let at = packed.len() - 5;
        packed[at] ^= 1;
        assert_eq!(decompress(&packed, 1000), Err(Error::Broken));
    }
}
