//! A compressed answer: passed on as it is, and read from a decoded copy that is never kept.

use std::io::{self, Write};

use bytes::Bytes;

use super::{Plain, Progress};

/// Most bytes that one chunk may decode to before reading is given up: a bomb must not hold the event loop.
const DECODED_BYTES_PER_CHUNK_MAX: usize = 16 << 20;
/// Largest window of a zstd answer, as RFC 9659 bounds it: 8 MiB.
const ZSTD_WINDOW_LOG_MAX: u32 = 23;

/// Decodes a copy into a plain reader.
pub(super) struct Encoded {
    decoder: Decoder,
    /// What had been seen when reading was given up.
    last: Progress,
}

enum Decoder {
    Gzip(Box<flate2::write::MultiGzDecoder<Sink>>),
    Deflate(Box<flate2::write::ZlibDecoder<Sink>>),
    Brotli(Box<brotli::DecompressorWriter<Sink>>),
    Zstd(Box<zstd::stream::write::Decoder<'static, Sink>>),
    /// An unknown coding, or one that broke.
    GivenUp,
}

/// Takes decoded bytes.
struct Sink {
    plain: Plain,
    room: usize,
}

impl Write for Sink {
    fn write(&mut self, decoded: &[u8]) -> io::Result<usize> {
        if decoded.len() > self.room {
            return Err(io::Error::other("decodes to too much"));
        }
        self.room -= decoded.len();
        self.plain.push(Bytes::copy_from_slice(decoded));
        Ok(decoded.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Encoded {
    pub(super) fn new(encoding: &str, plain: Plain) -> Self {
        let sink = Sink { plain, room: DECODED_BYTES_PER_CHUNK_MAX };
        let decoder = match encoding.to_ascii_lowercase().as_str() {
            "gzip" | "x-gzip" => Decoder::Gzip(Box::new(flate2::write::MultiGzDecoder::new(sink))),
            "deflate" => Decoder::Deflate(Box::new(flate2::write::ZlibDecoder::new(sink))),
            "br" => Decoder::Brotli(Box::new(brotli::DecompressorWriter::new(sink, 4096))),
            "zstd" => zstd(sink).unwrap_or(Decoder::GivenUp),
            _ => Decoder::GivenUp,
        };
        let unread = matches!(decoder, Decoder::GivenUp);
        Encoded { decoder, last: Progress { unread, ..Progress::default() } }
    }

    pub(super) fn feed(&mut self, chunk: &[u8]) {
        if let Some(sink) = self.decoder.sink() {
            sink.room = DECODED_BYTES_PER_CHUNK_MAX;
        }
        if self.decoder.write(chunk).is_err() {
            self.give_up();
        }
    }

    pub(super) fn finish(&mut self) {
        if let Some(sink) = self.decoder.sink() {
            sink.plain.finish();
        }
    }

    pub(super) fn progress(&self) -> &Progress {
        self.decoder.plain().map_or(&self.last, |plain| &plain.tally.progress)
    }

    fn give_up(&mut self) {
        self.last = Progress { unread: true, ..self.progress().clone() };
        self.decoder = Decoder::GivenUp;
    }
}

fn zstd(sink: Sink) -> io::Result<Decoder> {
    let mut decoder = zstd::stream::write::Decoder::new(sink)?;
    decoder.window_log_max(ZSTD_WINDOW_LOG_MAX)?;
    Ok(Decoder::Zstd(Box::new(decoder)))
}

impl Decoder {
    fn write(&mut self, chunk: &[u8]) -> io::Result<()> {
        // The flush brings out what has been decoded: the next chunk of a stream may be minutes away.
        let into: &mut dyn Write = match self {
            Decoder::Gzip(decoder) => decoder,
            Decoder::Deflate(decoder) => decoder,
            Decoder::Brotli(decoder) => decoder,
            Decoder::Zstd(decoder) => decoder,
            Decoder::GivenUp => return Ok(()),
        };
        into.write_all(chunk)?;
        into.flush()
    }

    fn sink(&mut self) -> Option<&mut Sink> {
        Some(match self {
            Decoder::Gzip(decoder) => decoder.get_mut(),
            Decoder::Deflate(decoder) => decoder.get_mut(),
            Decoder::Brotli(decoder) => decoder.get_mut(),
            Decoder::Zstd(decoder) => decoder.get_mut(),
            Decoder::GivenUp => return None,
        })
    }

    fn plain(&self) -> Option<&Plain> {
        Some(match self {
            Decoder::Gzip(decoder) => &decoder.get_ref().plain,
            Decoder::Deflate(decoder) => &decoder.get_ref().plain,
            Decoder::Brotli(decoder) => &decoder.get_ref().plain,
            Decoder::Zstd(decoder) => &decoder.get_ref().plain,
            Decoder::GivenUp => return None,
        })
    }
}

impl std::fmt::Debug for Encoded {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Encoded").field("progress", self.progress()).finish_non_exhaustive()
    }
}
