//! What images, audio, video and files cost: bounded, by the model family's published rule where there is one.
//!
//! Base64 is never counted as text: a part's data is looked at only for its size, and an image's first bytes for its
//! width and height. All such counts are marked approximate.

use std::path::Path;

use serde_json::Value as Json;

/// What a media part is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MediaKind {
    Image,
    Audio,
    Video,
    File,
    /// A part of a type nobody knows.
    Unknown,
}

/// A media part, as far as its cost goes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Media {
    pub kind: MediaKind,
    /// Bytes of decoded data given inline; 0 for a link.
    pub bytes: u64,
    /// Width and height in pixels, from the data's own header.
    pub size: Option<(u32, u32)>,
}

/// Audio costs about this many tokens a second in Whisper-based models (Qwen2-Audio: 25).
const AUDIO_TOKENS_PER_SECOND: f64 = 25.0;
/// 16 kHz, 16 bit, one channel: what WAV from speech clients mostly is; compressed audio is shorter than it seems.
const AUDIO_BYTES_PER_SECOND: f64 = 32_000.0;
/// No audio part costs more: 30 seconds is Whisper's window, ten of them are five minutes.
const AUDIO_TOKENS_MAX: u64 = 7_500;
/// Frames that a video is mostly sampled to.
const VIDEO_FRAMES: u64 = 8;
/// Pages of a document that are charged at most, and the bytes of one.
const FILE_PAGES_MAX: u64 = 20;
const FILE_BYTES_PER_PAGE: u64 = 50_000;

/// A model family's rule for an image's tokens.
#[derive(Clone, Debug, PartialEq)]
pub enum ImageRule {
    /// Nothing is published: the configured number.
    Configured,
    /// The same for any image (LLaVA 1.5: 576, Gemma 3: 256).
    Fixed(u64),
    /// Qwen2-VL and its successors: sides rounded to `factor` pixels, area between the bounds, a token per square.
    Squares { factor: u32, pixels_min: u64, pixels_max: u64 },
    /// Pixtral and Mistral 3: longest side at most `side_max`, a token per `patch` square and one more per row.
    Rows { patch: u32, side_max: u32 },
    /// InternVL: up to `tiles_max` tiles of `side` pixels and a thumbnail, `tokens` each.
    Tiles { side: u32, tiles_max: u64, tokens: u64 },
}

/// Counts media parts for one model.
#[derive(Clone, Debug, PartialEq)]
pub struct MediaRules {
    pub image: ImageRule,
}

impl Default for MediaRules {
    fn default() -> Self {
        MediaRules { image: ImageRule::Configured }
    }
}

impl MediaRules {
    /// Reads the family from a model directory's `config.json` and `preprocessor_config.json`.
    pub fn of_directory(dir: &Path) -> MediaRules {
        let read = |name: &str| -> Option<Json> { serde_json::from_slice(&std::fs::read(dir.join(name)).ok()?).ok() };
        match read("config.json") {
            Some(config) => Self::of_config(&config, &read("preprocessor_config.json").unwrap_or(Json::Null)),
            None => MediaRules::default(),
        }
    }

    /// The rule of a model's `model_type`, with the sizes its files give.
    pub fn of_config(config: &Json, processor: &Json) -> MediaRules {
        let number = |value: &Json| value.as_u64();
        let vision = &config["vision_config"];
        let family = config["model_type"].as_str().unwrap_or_default();
        let image = match family {
            "qwen2_vl" | "qwen2_5_vl" | "qwen3_vl" | "qwen3_vl_moe" | "qwen2_5_omni" | "qwen3_5" => {
                let patch = number(&processor["patch_size"]).or(number(&vision["patch_size"])).unwrap_or(14);
                let merge = number(&processor["merge_size"]).or(number(&vision["spatial_merge_size"])).unwrap_or(2);
                let size = &processor["size"];
                let pixels_min = number(&processor["min_pixels"]).or(number(&size["shortest_edge"]));
                let pixels_max = number(&processor["max_pixels"]).or(number(&size["longest_edge"]));
                ImageRule::Squares {
                    factor: (patch * merge).clamp(1, 1024) as u32,
                    pixels_min: pixels_min.unwrap_or(56 * 56),
                    pixels_max: pixels_max.unwrap_or(12_845_056),
                }
            }
            "llava" => ImageRule::Fixed(576),
            "gemma3" | "gemma3n" | "paligemma" => {
                ImageRule::Fixed(number(&config["mm_tokens_per_image"]).unwrap_or(256))
            }
            // Llama 3.2 Vision attends to images beside the text: one placeholder token each.
            "mllama" => ImageRule::Fixed(1),
            "pixtral" | "mistral3" => {
                let patch = number(&vision["patch_size"]).unwrap_or(16);
                let merge = number(&config["spatial_merge_size"]).unwrap_or(1);
                let side = number(&vision["image_size"]).unwrap_or(1024);
                ImageRule::Rows {
                    patch: (patch * merge).clamp(1, 1024) as u32,
                    side_max: side.clamp(1, 1 << 16) as u32,
                }
            }
            "internvl_chat" | "internvl" => ImageRule::Tiles {
                side: number(&config["force_image_size"]).unwrap_or(448).clamp(1, 1 << 16) as u32,
                tiles_max: number(&config["max_dynamic_patch"]).unwrap_or(12),
                tokens: 256,
            },
            _ => ImageRule::Configured,
        };
        MediaRules { image }
    }

    /// A part's tokens; `per_image` is the model's configured number.
    pub fn tokens(&self, media: &Media, per_image: u64) -> u64 {
        match media.kind {
            MediaKind::Image => self.image_tokens(media.size, per_image),
            MediaKind::Audio => {
                let seconds = media.bytes as f64 / AUDIO_BYTES_PER_SECOND;
                let seconds = if media.bytes == 0 { 30.0 } else { seconds };
                ((seconds * AUDIO_TOKENS_PER_SECOND) as u64).clamp(1, AUDIO_TOKENS_MAX)
            }
            MediaKind::Video => VIDEO_FRAMES * self.image_tokens(media.size, per_image).min(per_image.max(1)),
            MediaKind::File => (media.bytes / FILE_BYTES_PER_PAGE + 1).min(FILE_PAGES_MAX) * per_image,
            MediaKind::Unknown => per_image,
        }
    }

    fn image_tokens(&self, size: Option<(u32, u32)>, per_image: u64) -> u64 {
        match (&self.image, size) {
            (ImageRule::Fixed(tokens), _) => *tokens,
            (ImageRule::Configured, _) | (_, None) => per_image,
            (ImageRule::Squares { factor, pixels_min, pixels_max }, Some(size)) => {
                squares(size, *factor, *pixels_min, *pixels_max)
            }
            (ImageRule::Rows { patch, side_max }, Some((w, h))) => {
                let scale = f64::from((*side_max).min(w.max(h))) / f64::from(w.max(h).max(1));
                let cells = |side: u32| ((f64::from(side) * scale).floor() as u64).div_ceil(u64::from(*patch)).max(1);
                let (columns, rows) = (cells(w), cells(h));
                columns * rows + rows
            }
            (ImageRule::Tiles { side, tiles_max, tokens }, Some((w, h))) => {
                let tiles = u64::from(w.div_ceil(*side)).max(1) * u64::from(h.div_ceil(*side)).max(1);
                let tiles = tiles.clamp(1, *tiles_max);
                (tiles + u64::from(tiles > 1)) * tokens
            }
        }
    }
}

/// Qwen2-VL's `smart_resize`, then a token per `factor` square.
fn squares((w, h): (u32, u32), factor: u32, pixels_min: u64, pixels_max: u64) -> u64 {
    let (w, h, f) = (f64::from(w.max(1)), f64::from(h.max(1)), f64::from(factor));
    let round = |side: f64| (side / f).round_ties_even().max(1.0) * f;
    let (mut across, mut down) = (round(w), round(h));
    let area = across * down;
    if area > pixels_max as f64 {
        let beta = (w * h / pixels_max as f64).sqrt();
        across = ((w / beta / f).floor() * f).max(f);
        down = ((h / beta / f).floor() * f).max(f);
    } else if area < pixels_min as f64 {
        let beta = (pixels_min as f64 / (w * h)).sqrt();
        across = (w * beta / f).ceil() * f;
        down = (h * beta / f).ceil() * f;
    }
    ((across / f) * (down / f)) as u64
}

/// Reads what a data URL or bare base64 says about itself. Links give nothing.
pub fn look_at(text: &str) -> (u64, Option<(u32, u32)>) {
    let base64 = match text.strip_prefix("data:") {
        Some(rest) => match rest.split_once(',') {
            Some((_, data)) => data,
            None => return (0, None),
        },
        None if text.len() > 256 && !text.contains("://") => text,
        None => return (0, None),
    };
    (base64.len() as u64 / 4 * 3, image_size(&head_of(base64)))
}

/// Characters of base64 that are decoded: enough for an image's header (JPEG's may follow a long EXIF block).
const HEAD_CHARS: usize = 88_000;

fn head_of(base64: &str) -> Vec<u8> {
    decode_base64(&base64.as_bytes()[..base64.len().min(HEAD_CHARS)])
}

/// Decodes base64 of either alphabet up to the first character that is none of it.
pub(crate) fn decode_base64(base64: &[u8]) -> Vec<u8> {
    let mut out = Vec::with_capacity(base64.len() / 4 * 3 + 2);
    let (mut bits, mut count) = (0u32, 0u32);
    for byte in base64 {
        let six = match byte {
            b'A'..=b'Z' => byte - b'A',
            b'a'..=b'z' => byte - b'a' + 26,
            b'0'..=b'9' => byte - b'0' + 52,
            b'+' | b'-' => 62,
            b'/' | b'_' => 63,
            b'\r' | b'\n' => continue,
            _ => break,
        };
        bits = bits << 6 | u32::from(six);
        count += 1;
        if count == 4 {
            out.extend_from_slice(&bits.to_be_bytes()[1..]);
            (bits, count) = (0, 0);
        }
    }
    match count {
        2 => out.push((bits >> 4) as u8),
        3 => out.extend_from_slice(&(bits >> 2).to_be_bytes()[2..]),
        _ => {}
    }
    out
}

/// Width and height from a PNG, GIF, WebP or JPEG header.
fn image_size(head: &[u8]) -> Option<(u32, u32)> {
    let be32 = |at: usize| Some(u32::from_be_bytes(head.get(at..at + 4)?.try_into().ok()?));
    let be16 = |at: usize| Some(u32::from(u16::from_be_bytes(head.get(at..at + 2)?.try_into().ok()?)));
    let le16 = |at: usize| Some(u32::from(u16::from_le_bytes(head.get(at..at + 2)?.try_into().ok()?)));
    let le24 = |at: usize| Some(le16(at)? | u32::from(*head.get(at + 2)?) << 16);
    let size = if head.starts_with(b"\x89PNG\r\n\x1a\n") {
        (be32(16)?, be32(20)?)
    } else if head.starts_with(b"GIF8") {
        (le16(6)?, le16(8)?)
    } else if head.starts_with(b"RIFF") && head.get(8..12) == Some(b"WEBP") {
        match head.get(12..16)? {
            b"VP8X" => (le24(24)? + 1, le24(27)? + 1),
            b"VP8L" => {
                let bits = u32::from_le_bytes(head.get(21..25)?.try_into().ok()?);
                ((bits & 0x3fff) + 1, (bits >> 14 & 0x3fff) + 1)
            }
            _ => (le16(26)? & 0x3fff, le16(28)? & 0x3fff),
        }
    } else if head.starts_with(b"\xff\xd8") {
        let mut at = 2;
        loop {
            let (mark, marker) = (*head.get(at)?, *head.get(at + 1)?);
            if mark != 0xff {
                return None;
            }
            // Start-of-frame markers carry the size; DHT, JPG and DAC share their range.
            if (0xc0..=0xcf).contains(&marker) && !matches!(marker, 0xc4 | 0xc8 | 0xcc) {
                break (be16(at + 7)?, be16(at + 5)?);
            }
            at += 2 + be16(at + 2)? as usize;
        }
    } else {
        return None;
    };
    (size.0 > 0 && size.1 > 0).then_some(size)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn png(w: u32, h: u32) -> Vec<u8> {
        let mut bytes = b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR".to_vec();
        bytes.extend(w.to_be_bytes());
        bytes.extend(h.to_be_bytes());
        bytes.extend([8, 2, 0, 0, 0, 0]);
        bytes
    }

    #[test]
    fn sizes_are_read_from_each_format_s_header() {
        assert_eq!(image_size(&png(640, 480)), Some((640, 480)));
        assert_eq!(image_size(b"GIF89a\x40\x01\xf0\x00rest"), Some((320, 240)));
        let jpeg = [0xff, 0xd8, 0xff, 0xe0, 0, 4, 0, 0, 0xff, 0xc0, 0, 11, 8, 0x02, 0x58, 0x03, 0x20, 3];
        assert_eq!(image_size(&jpeg), Some((800, 600)));
        let mut webp = b"RIFF\0\0\0\0WEBPVP8X\0\0\0\0\0\0\0\0".to_vec();
        webp.extend([0x1f, 0x03, 0, 0x57, 0x02, 0]);
        assert_eq!(image_size(&webp), Some((800, 600)));
        assert_eq!(image_size(b"\xff\xd8\xff"), None);
    }

    #[test]
    fn base64_is_decoded_with_and_without_padding() {
        for (text, bytes) in [("", ""), ("Zg==", "f"), ("Zm8", "fo"), ("Zm9v", "foo"), ("Zm9vYg==", "foob")] {
            assert_eq!(decode_base64(text.as_bytes()), bytes.as_bytes());
        }
    }

    #[test]
    fn a_zero_size_in_a_header_is_no_size() {
        assert_eq!(image_size(&png(0, 480)), None);
    }

    #[test]
    fn qwen_images_cost_a_token_for_each_28_pixel_square() {
        let rules = MediaRules::of_config(&serde_json::json!({"model_type": "qwen2_vl"}), &Json::Null);
        let image = |w, h| Media { kind: MediaKind::Image, bytes: 1000, size: Some((w, h)) };
        // 1372 × 2044 is transformers' own example size for this processor: 49 × 73 squares.
        assert_eq!(rules.tokens(&image(1372, 2044), 765), 49 * 73);
        assert_eq!(rules.tokens(&image(1, 1), 765), 4);
        assert_eq!(rules.tokens(&Media { kind: MediaKind::Image, bytes: 0, size: None }, 765), 765);
    }

    #[test]
    fn no_part_costs_more_than_its_bound_however_large() {
        let rules = MediaRules::of_config(&serde_json::json!({"model_type": "qwen2_vl"}), &Json::Null);
        for kind in [MediaKind::Image, MediaKind::Audio, MediaKind::Video, MediaKind::File, MediaKind::Unknown] {
            let media = Media { kind, bytes: u64::MAX, size: Some((u32::MAX, u32::MAX)) };
            assert!(rules.tokens(&media, 765) <= 20_000, "{kind:?}");
        }
    }
}
