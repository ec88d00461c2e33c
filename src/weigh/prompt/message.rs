//! Messages read straight into template values, with media parts taken out on the way.

use minijinja::value::Value;
use serde::de::{self, Deserialize, DeserializeSeed, Deserializer, IgnoredAny, MapAccess, SeqAccess, Visitor};

use crate::weigh::media::{Media, MediaKind, look_at};
use crate::weigh::template::dict::{Entries, Json, Key};

/// One message as sent; its content stands apart from its other members.
#[derive(Debug, Default)]
pub struct Message {
    /// All members but the content; where the content stood, an undefined value keeps its place.
    pub entries: Entries,
    pub content: Content,
}

/// A message's content.
#[derive(Debug, Default)]
pub enum Content {
    #[default]
    Absent,
    Null,
    Text(Value),
    Parts(Vec<Part>),
    /// A type that no API knows.
    Other(Value),
}

/// A part of a message's content.
#[derive(Debug)]
pub enum Part {
    /// Text of any kind, and the part as it was sent.
    Text {
        text: Value,
        sent: Value,
    },
    Media(Media),
    /// Something else, as sent: tool uses, tool results.
    Other(Value),
}

impl Message {
    /// A message made here.
    pub fn new(role: &str, content: Content) -> Message {
        let entries =
            Entries(vec![(Value::from("role"), Value::from(role)), (Value::from("content"), Value::UNDEFINED)]);
        Message { entries, content }
    }

    /// Its role; empty where it has none.
    pub fn role(&self) -> &str {
        self.entries.get("role").and_then(|role| role.as_str()).unwrap_or_default()
    }

    /// Every text in it, for estimates.
    pub fn texts(&self, take: &mut dyn FnMut(&str)) {
        match &self.content {
            Content::Text(text) => take(text.as_str().unwrap_or_default()),
            Content::Parts(parts) => {
                for part in parts {
                    match part {
                        Part::Text { text, .. } => take(text.as_str().unwrap_or_default()),
                        Part::Other(value) => take(&value.to_string()),
                        Part::Media(_) => {}
                    }
                }
            }
            Content::Absent | Content::Null | Content::Other(_) => {}
        }
        if let Some(calls) = self.entries.get("tool_calls") {
            take(&calls.to_string());
        }
    }

    /// Its media parts.
    pub fn media(&self) -> impl Iterator<Item = &Media> {
        let parts: &[Part] = match &self.content {
            Content::Parts(parts) => parts,
            _ => &[],
        };
        parts.iter().filter_map(|part| match part {
            Part::Media(media) => Some(media),
            _ => None,
        })
    }
}

impl<'de> Deserialize<'de> for Message {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct MessageVisitor;
        impl<'de> Visitor<'de> for MessageVisitor {
            type Value = Message;

            fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str("a message object")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Message, A::Error> {
                let mut message = Message::default();
                while let Some(key) = map.next_key::<Key<'de>>()? {
                    if key.0 == "content" {
                        message.content = map.next_value()?;
                        message.entries.read("content", Value::UNDEFINED);
                    } else {
                        let value = map.next_value_seed(Json)?;
                        message.entries.read(&key.0, value);
                    }
                }
                Ok(message)
            }
        }
        deserializer.deserialize_map(MessageVisitor)
    }
}

impl<'de> Deserialize<'de> for Content {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct ContentVisitor;
        impl<'de> Visitor<'de> for ContentVisitor {
            type Value = Content;

            fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str("content")
            }

            fn visit_str<E: de::Error>(self, v: &str) -> Result<Content, E> {
                Ok(Content::Text(Value::from(v)))
            }

            fn visit_unit<E: de::Error>(self) -> Result<Content, E> {
                Ok(Content::Null)
            }

            fn visit_bool<E: de::Error>(self, v: bool) -> Result<Content, E> {
                Ok(Content::Other(Value::from(v)))
            }

            fn visit_i64<E: de::Error>(self, v: i64) -> Result<Content, E> {
                Ok(Content::Other(Value::from(v)))
            }

            fn visit_u64<E: de::Error>(self, v: u64) -> Result<Content, E> {
                Ok(Content::Other(Value::from(v)))
            }

            fn visit_f64<E: de::Error>(self, v: f64) -> Result<Content, E> {
                Ok(Content::Other(Value::from(v)))
            }

            fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<Content, A::Error> {
                Json.visit_map(map).map(Content::Other)
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Content, A::Error> {
                let mut parts = Vec::new();
                while let Some(part) = seq.next_element()? {
                    parts.push(part);
                }
                Ok(Content::Parts(parts))
            }
        }
        deserializer.deserialize_any(ContentVisitor)
    }
}

/// Members of a part that hold media, wherever the part stands.
const MEDIA_KEYS: [&str; 13] = [
    "image_url",
    "image",
    "input_image",
    "image_embeds",
    "input_audio",
    "audio_url",
    "audio",
    "video_url",
    "video",
    "file",
    "file_data",
    "file_url",
    "source",
];

/// What a part's type (or, without one, a media member's name) says it is.
fn media_kind(name: &str) -> Option<MediaKind> {
    Some(match name {
        "image_url" | "image" | "input_image" | "image_embeds" => MediaKind::Image,
        "input_audio" | "audio_url" | "audio" | "audio_embeds" => MediaKind::Audio,
        "video_url" | "video" => MediaKind::Video,
        "file" | "input_file" | "document" | "file_data" | "file_url" => MediaKind::File,
        _ => return None,
    })
}

impl<'de> Deserialize<'de> for Part {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(PartVisitor)
    }
}

struct PartVisitor;

impl<'de> Visitor<'de> for PartVisitor {
    type Value = Part;

    fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("a content part")
    }

    fn visit_str<E: de::Error>(self, v: &str) -> Result<Part, E> {
        let text = Value::from(v);
        Ok(Part::Text { sent: text.clone(), text })
    }

    fn visit_unit<E: de::Error>(self) -> Result<Part, E> {
        Ok(Part::Other(Value::from(())))
    }

    fn visit_bool<E: de::Error>(self, v: bool) -> Result<Part, E> {
        Ok(Part::Other(Value::from(v)))
    }

    fn visit_i64<E: de::Error>(self, v: i64) -> Result<Part, E> {
        Ok(Part::Other(Value::from(v)))
    }

    fn visit_u64<E: de::Error>(self, v: u64) -> Result<Part, E> {
        Ok(Part::Other(Value::from(v)))
    }

    fn visit_f64<E: de::Error>(self, v: f64) -> Result<Part, E> {
        Ok(Part::Other(Value::from(v)))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, seq: A) -> Result<Part, A::Error> {
        Json.visit_seq(seq).map(Part::Other)
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Part, A::Error> {
        let mut sent = Entries::default();
        let mut seen: Option<(MediaKind, Look)> = None;
        while let Some(key) = map.next_key::<Key<'de>>()? {
            if MEDIA_KEYS.contains(&&*key.0) {
                let look = map.next_value_seed(LookSeed)?;
                let kind = media_kind(&key.0).unwrap_or(MediaKind::Unknown);
                match &mut seen {
                    Some((_, known)) => known.merge(look),
                    None => seen = Some((kind, look)),
                }
            } else if key.0 == "content" {
                // A tool result's own parts, where images come back too.
                let inner: Content = map.next_value()?;
                sent.read("content", inner_value(inner, &mut seen));
            } else {
                let value = map.next_value_seed(Json)?;
                sent.read(&key.0, value);
            }
        }
        let kind_of_part = sent.get("type").and_then(|t| t.as_str().map(str::to_owned));
        let typed = kind_of_part.as_deref().and_then(media_kind);
        if let Some(kind) = typed {
            let look = seen.map(|(_, look)| look).unwrap_or_default();
            return Ok(Part::Media(Media { kind, bytes: look.bytes, size: look.size }));
        }
        match kind_of_part.as_deref() {
            Some("text" | "input_text" | "output_text" | "refusal" | "thinking") => {
                let text = ["text", "refusal", "thinking"]
                    .iter()
                    .find_map(|name| sent.get(name).filter(|v| v.as_str().is_some()).cloned());
                match text {
                    Some(text) => Ok(Part::Text { text, sent: sent.into_value() }),
                    None => Ok(Part::Other(sent.into_value())),
                }
            }
            Some("tool_use" | "tool_result" | "tool_reference" | "redacted_thinking") => {
                Ok(Part::Other(sent.into_value()))
            }
            Some(_) => {
                let look = seen.map(|(_, look)| look).unwrap_or_default();
                Ok(Part::Media(Media { kind: MediaKind::Unknown, bytes: look.bytes, size: look.size }))
            }
            None => match (seen, sent.get("text")) {
                (Some((kind, look)), _) => Ok(Part::Media(Media { kind, bytes: look.bytes, size: look.size })),
                (None, Some(text)) if text.as_str().is_some() => {
                    Ok(Part::Text { text: text.clone(), sent: sent.into_value() })
                }
                _ => Ok(Part::Other(sent.into_value())),
            },
        }
    }
}

/// A tool result's content as a template value; its media are noted in `seen` and leave an empty part.
fn inner_value(content: Content, seen: &mut Option<(MediaKind, Look)>) -> Value {
    match content {
        Content::Absent | Content::Null => Value::from(()),
        Content::Text(value) | Content::Other(value) => value,
        Content::Parts(parts) => Value::from(
            parts
                .into_iter()
                .map(|part| match part {
                    Part::Text { sent, .. } | Part::Other(sent) => sent,
                    Part::Media(media) => {
                        *seen = Some((media.kind, Look { bytes: media.bytes, size: media.size }));
                        let mut entry = Entries::default();
                        entry.set("type", Value::from("media"));
                        entry.set("bytes", Value::from(media.bytes));
                        entry.into_value()
                    }
                })
                .collect::<Vec<Value>>(),
        ),
    }
}

/// What was seen of media data.
#[derive(Clone, Copy, Debug, Default)]
struct Look {
    bytes: u64,
    size: Option<(u32, u32)>,
}

impl Look {
    fn merge(&mut self, other: Look) {
        self.bytes = self.bytes.max(other.bytes);
        self.size = self.size.or(other.size);
    }
}

/// Looks at media data without keeping it.
struct LookSeed;

impl<'de> DeserializeSeed<'de> for LookSeed {
    type Value = Look;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Look, D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for LookSeed {
    type Value = Look;

    fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("media data")
    }

    fn visit_str<E: de::Error>(self, v: &str) -> Result<Look, E> {
        let (bytes, size) = look_at(v);
        Ok(Look { bytes, size })
    }

    fn visit_unit<E: de::Error>(self) -> Result<Look, E> {
        Ok(Look::default())
    }

    fn visit_bool<E: de::Error>(self, _: bool) -> Result<Look, E> {
        Ok(Look::default())
    }

    fn visit_i64<E: de::Error>(self, _: i64) -> Result<Look, E> {
        Ok(Look::default())
    }

    fn visit_u64<E: de::Error>(self, _: u64) -> Result<Look, E> {
        Ok(Look::default())
    }

    fn visit_f64<E: de::Error>(self, _: f64) -> Result<Look, E> {
        Ok(Look::default())
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Look, A::Error> {
        let mut look = Look::default();
        while let Some(inner) = seq.next_element_seed(LookSeed)? {
            look.merge(inner);
        }
        Ok(look)
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Look, A::Error> {
        let mut look = Look::default();
        while map.next_key::<IgnoredAny>()?.is_some() {
            look.merge(map.next_value_seed(LookSeed)?);
        }
        Ok(look)
    }
}

/// Reads a `messages` array.
///
/// # Errors
/// Where it is no array of objects, or nested deeper than 128.
pub fn read_messages(raw: &[u8]) -> Result<Vec<Message>, serde_json::Error> {
    serde_json::from_slice(raw)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn media_data_is_looked_at_and_never_kept() {
        let png = "iVBORw0KGgoAAAANSUhEUgAAAoAAAAHgCAIAAAA".to_owned() + &"A".repeat(4000);
        let raw = format!(
            r#"[{{"role":"user","content":[{{"type":"text","text":"what"}},
                {{"type":"image_url","image_url":{{"url":"data:image/png;base64,{png}"}}}}]}}]"#
        );
        let messages = read_messages(raw.as_bytes()).unwrap();
        let media: Vec<&Media> = messages[0].media().collect();
        assert_eq!(media.len(), 1);
        assert_eq!((media[0].kind, media[0].size), (MediaKind::Image, Some((640, 480))));
        let mut text = String::new();
        messages[0].texts(&mut |t| text.push_str(t));
        assert_eq!(text, "what");
    }

    #[test]
    fn text_that_mentions_a_data_url_stays_text() {
        let raw = br#"[{"role":"user","content":[{"type":"text","text":"data:image/png;base64,AAAA"}]}]"#;
        let messages = read_messages(raw).unwrap();
        assert_eq!(messages[0].media().count(), 0);
        assert!(matches!(&messages[0].content, Content::Parts(parts) if matches!(parts[0], Part::Text { .. })));
    }

    #[test]
    fn a_part_of_an_unknown_type_has_the_bounded_cost() {
        let raw = br#"[{"role":"user","content":[{"type":"hologram","data":"zzzz"}]}]"#;
        let messages = read_messages(raw).unwrap();
        assert_eq!(messages[0].media().next().unwrap().kind, MediaKind::Unknown);
    }
}
