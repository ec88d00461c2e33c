//! Puts together what leaves: a slice of the chunk itself wherever that is possible.

use std::ops::Range;

use bytes::Bytes;

/// Collects what goes to the client from one push.
#[derive(Debug)]
pub(super) struct Out {
    chunk: Bytes,
    /// Of the chunk, while one range of it is all there is.
    range: Range<usize>,
    /// Once it is more than one range.
    copied: Option<Vec<u8>>,
}

impl Out {
    pub(super) fn new(chunk: Bytes) -> Self {
        Out { chunk, range: 0..0, copied: None }
    }

    /// Lets a range of the chunk go.
    #[inline]
    pub(super) fn pass(&mut self, range: Range<usize>) {
        if range.is_empty() {
            return;
        }
        match &mut self.copied {
            Some(copied) => copied.extend_from_slice(&self.chunk[range]),
            None if self.range.is_empty() => self.range = range,
            None if self.range.end == range.start => self.range.end = range.end,
            None => {
                let both = [&self.chunk[self.range.clone()], &self.chunk[range]].concat();
                self.copied = Some(both);
            }
        }
    }

    /// Lets bytes go that were held back from earlier chunks.
    pub(super) fn release(&mut self, held: &[u8]) {
        if held.is_empty() {
            return;
        }
        let chunk = &self.chunk;
        let range = &self.range;
        self.copied.get_or_insert_with(|| chunk[range.clone()].to_vec()).extend_from_slice(held);
    }

    pub(super) fn into_bytes(self) -> Bytes {
        match self.copied {
            Some(copied) => Bytes::from(copied),
            None if self.range.len() == self.chunk.len() => self.chunk,
            None => self.chunk.slice(self.range),
        }
    }
}
