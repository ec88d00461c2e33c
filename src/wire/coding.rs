//! Compressed request bodies, decoded within bounds. Popular coding clients compress what is large.

use std::io::{self, Read};

use bytes::Bytes;

use super::error::{ApiError, ErrorCode};

/// Codings applied one over another; nobody has a reason for more.
const CODINGS_MAX: usize = 2;
/// Largest window of zstd as a content coding, as RFC 9659 bounds it: 8 MiB.
const ZSTD_WINDOW_LOG_MAX: u32 = 23;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Coding {
    Gzip,
    Deflate,
    Brotli,
    Zstd,
}

impl Coding {
    fn name(self) -> &'static str {
        match self {
            Coding::Gzip => "gzip data",
            Coding::Deflate => "deflate data",
            Coding::Brotli => "brotli data",
            Coding::Zstd => "zstd data with a window of at most 8 MiB",
        }
    }
}

/// Decodes a body by its `content-encoding`. The same bytes come back where there is nothing to decode.
///
/// # Errors
/// `unsupported_encoding` for a coding that is not known, `request_too_large` where the body decodes to more than
/// `limit` bytes (nothing past it is decoded), `invalid_request` where it does not decode.
pub fn decode_request_body(encoding: &str, body: Bytes, limit: u64) -> Result<Bytes, ApiError> {
    let codings = codings(encoding)?;
    let mut body = body;
    // The last coding named was applied last, so it comes off first.
    for coding in codings.into_iter().rev() {
        body = decode(coding, &body, limit)?;
    }
    Ok(body)
}

/// Whether every coding named is known, so that a body need not be read to refuse it.
///
/// # Errors
/// `unsupported_encoding`.
pub fn check_encoding(encoding: &str) -> Result<(), ApiError> {
    codings(encoding).map(|_| ())
}

fn codings(encoding: &str) -> Result<Vec<Coding>, ApiError> {
    let mut found = Vec::new();
    for name in encoding.split(',').map(|name| name.trim().to_ascii_lowercase()) {
        found.push(match name.as_str() {
            "" | "identity" => continue,
            "gzip" | "x-gzip" => Coding::Gzip,
            "deflate" => Coding::Deflate,
            "br" => Coding::Brotli,
            "zstd" => Coding::Zstd,
            _ => return Err(unsupported("This content-encoding is not known")),
        });
    }
    if found.len() > CODINGS_MAX {
        return Err(unsupported("Too many codings are applied to the body"));
    }
    Ok(found)
}

fn unsupported(what: &str) -> ApiError {
    let message = format!("{what}. Send the body as it is, or in gzip, deflate, br or zstd.");
    ApiError::new(ErrorCode::UnsupportedEncoding, message).param("content-encoding")
}

fn decode(coding: Coding, body: &[u8], limit: u64) -> Result<Bytes, ApiError> {
    let decoded = match coding {
        Coding::Gzip => read(flate2::read::MultiGzDecoder::new(body), limit),
        // Some clients send raw deflate under this name, where zlib's format is meant.
        Coding::Deflate if zlib(body) => read(flate2::read::ZlibDecoder::new(body), limit),
        Coding::Deflate => read(flate2::read::DeflateDecoder::new(body), limit),
        Coding::Brotli => read(brotli::Decompressor::new(body, 4096), limit),
        Coding::Zstd => zstd::stream::read::Decoder::new(body).and_then(|mut decoder| {
            decoder.window_log_max(ZSTD_WINDOW_LOG_MAX)?;
            read(decoder, limit)
        }),
    };
    match decoded {
        Ok(Some(decoded)) => Ok(decoded),
        Ok(None) => Err(ApiError::new(
            ErrorCode::RequestTooLarge,
            format!("The body decodes to more than the {limit} bytes of limits.body_bytes."),
        )),
        Err(_) => {
            let message = format!("The body is not {}, as its content-encoding says.", coding.name());
            Err(ApiError::new(ErrorCode::InvalidRequest, message).param("content-encoding"))
        }
    }
}

/// Reads to the end; `None` past the limit.
fn read(decoder: impl Read, limit: u64) -> io::Result<Option<Bytes>> {
    let mut decoded = Vec::new();
    decoder.take(limit.saturating_add(1)).read_to_end(&mut decoded)?;
    Ok((decoded.len() as u64 <= limit).then(|| Bytes::from(decoded)))
}

/// Whether the bytes begin as zlib's format does (RFC 1950, section 2.2).
fn zlib(body: &[u8]) -> bool {
    matches!(body, [cmf, flags, ..] if cmf & 0x0F == 8 && (u16::from(*cmf) * 256 + u16::from(*flags)) % 31 == 0)
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    const TEXT: &[u8] = b"{\"model\":\"m1\",\"messages\":[]}";

    fn gzip(bytes: &[u8]) -> Vec<u8> {
        let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::best());
        encoder.write_all(bytes).unwrap();
        encoder.finish().unwrap()
    }

    fn decoded(encoding: &str, body: &[u8]) -> Result<Bytes, ApiError> {
        decode_request_body(encoding, Bytes::copy_from_slice(body), 1 << 20)
    }

    #[test]
    fn c038_gzip_and_zstd_bodies_are_decoded() {
        for (encoding, body) in [
            ("gzip", include_bytes!("../../tests/field_cases/data/c038-request.json.gz").as_slice()),
            ("X-GZIP", include_bytes!("../../tests/field_cases/data/c038-request.json.gz")),
            ("zstd", include_bytes!("../../tests/field_cases/data/c038-request.json.zst")),
        ] {
            let body = decoded(encoding, body).unwrap();
            assert!(serde_json::from_slice::<serde_json::Value>(&body).is_ok(), "{encoding}");
        }
    }

    #[test]
    fn every_coding_and_two_at_once_are_decoded() {
        let mut zlib = flate2::write::ZlibEncoder::new(Vec::new(), flate2::Compression::fast());
        zlib.write_all(TEXT).unwrap();
        let mut raw = flate2::write::DeflateEncoder::new(Vec::new(), flate2::Compression::fast());
        raw.write_all(TEXT).unwrap();
        let mut brotli = brotli::CompressorWriter::new(Vec::new(), 4096, 5, 20);
        brotli.write_all(TEXT).unwrap();
        let zstd = zstd::encode_all(TEXT, 3).unwrap();
        for (encoding, body) in [
            ("deflate", zlib.finish().unwrap()),
            ("deflate", raw.finish().unwrap()),
            ("br", brotli.into_inner()),
            ("zstd", zstd.clone()),
            ("zstd, gzip", gzip(&zstd)),
            ("", TEXT.to_vec()),
            ("identity", TEXT.to_vec()),
        ] {
            assert_eq!(decoded(encoding, &body).unwrap(), TEXT, "{encoding}");
        }
    }

    #[test]
    fn a_body_without_coding_is_the_very_same() {
        let body = Bytes::from_static(TEXT);
        assert_eq!(decode_request_body("identity", body.clone(), 1).unwrap().as_ptr(), body.as_ptr());
    }

    #[test]
    fn a_bomb_is_too_large_and_is_not_unpacked() {
        let zeros = vec![0u8; 64 << 20];
        let bombs = [("gzip", gzip(&zeros)), ("zstd", zstd::encode_all(zeros.as_slice(), 3).unwrap())];
        for (encoding, bomb) in bombs {
            assert!(bomb.len() < 100_000);
            let error = decoded(encoding, &bomb).unwrap_err();
            assert_eq!(error.code, ErrorCode::RequestTooLarge, "{encoding}");
            assert!(error.message.contains("limits.body_bytes"));
        }
        assert_eq!(decoded("gzip, gzip", &gzip(&gzip(&zeros))).unwrap_err().code, ErrorCode::RequestTooLarge);
        let exact = decode_request_body("gzip", Bytes::from(gzip(TEXT)), TEXT.len() as u64);
        assert_eq!(exact.unwrap(), TEXT);
    }

    #[test]
    fn what_does_not_decode_is_refused_with_what_is_wrong() {
        for encoding in ["gzip", "deflate", "br", "zstd"] {
            let error = decoded(encoding, b"plain text, not compressed").unwrap_err();
            assert_eq!(error.code, ErrorCode::InvalidRequest, "{encoding}");
            assert!(!error.message.contains("JSON"));
        }
        let cut = gzip(TEXT);
        assert_eq!(decoded("gzip", &cut[..cut.len() - 9]).unwrap_err().code, ErrorCode::InvalidRequest);
        for encoding in ["compress", "gzip, lzma", "gzip, gzip, gzip", "aes128gcm"] {
            assert_eq!(decoded(encoding, TEXT).unwrap_err().code, ErrorCode::UnsupportedEncoding, "{encoding}");
            assert!(check_encoding(encoding).is_err());
        }
    }
}
