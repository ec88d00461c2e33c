//! The line on which a key path stands.
//!
//! `serde_yaml::Value` carries no positions, but a deserialisation error does. So a place is found by walking the
//! parser along the path and failing there on purpose: the library's own parser decides, and flow style, comments,
//! anchors and multi-line scalars need no second grammar. A walk costs one parse, and only faults are looked up.

use std::fmt;

use serde::de::{DeserializeSeed, Deserializer, Error, IgnoredAny, MapAccess, SeqAccess, Visitor};

/// One step of a key path.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Step {
    Key(String),
    Index(usize),
}

/// A path as people read it: `replicas[0].url`.
pub(super) fn show(path: &[Step]) -> String {
    let mut text = String::new();
    for step in path {
        match step {
            Step::Key(key) => {
                if !text.is_empty() {
                    text.push('.');
                }
                text.push_str(key);
            }
            Step::Index(i) => text.push_str(&format!("[{i}]")),
        }
    }
    text
}

/// The line (from 1) of the value at `path`, or of its key; of the nearest parent that stands in the text where the
/// value itself does not (a missing key, one merged in by `<<`).
pub(super) fn line(text: &str, path: &[Step], at_key: bool) -> Option<usize> {
    let mut path = path;
    let mut at_key = at_key;
    loop {
        let walk = Walk { path, at_key };
        let place = walk.deserialize(serde_yaml::Deserializer::from_str(text)).err()?;
        if place.to_string().contains(HERE) {
            return place.location().map(|l| l.line());
        }
        let (_, parent) = path.split_last()?;
        path = parent;
        at_key = false;
    }
}

const HERE: &str = "weighbridge: the place looked for";
const NOT_HERE: &str = "weighbridge: no such place";

struct Walk<'p> {
    path: &'p [Step],
    at_key: bool,
}

impl<'de> DeserializeSeed<'de> for Walk<'_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl Walk<'_> {
    fn scalar<E: Error>(&self) -> Result<(), E> {
        Err(E::custom(if self.path.is_empty() { HERE } else { NOT_HERE }))
    }
}

impl<'de> Visitor<'de> for Walk<'_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(HERE)
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<(), A::Error> {
        let Some((Step::Key(wanted), rest)) = self.path.split_first() else { return self.scalar() };
        while let Some(found) = map.next_key_seed(KeySeed { wanted, fail: self.at_key && rest.is_empty() })? {
            if found {
                map.next_value_seed(Walk { path: rest, at_key: self.at_key })?;
                break;
            }
            map.next_value::<IgnoredAny>()?;
        }
        Err(A::Error::custom(NOT_HERE))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<(), A::Error> {
        let Some((Step::Index(wanted), rest)) = self.path.split_first() else { return self.scalar() };
        for _ in 0..*wanted {
            if seq.next_element::<IgnoredAny>()?.is_none() {
                return Err(A::Error::custom(NOT_HERE));
            }
        }
        seq.next_element_seed(Walk { path: rest, at_key: self.at_key })?;
        Err(A::Error::custom(NOT_HERE))
    }

    fn visit_bool<E: Error>(self, _: bool) -> Result<(), E> {
        self.scalar()
    }

    fn visit_i64<E: Error>(self, _: i64) -> Result<(), E> {
        self.scalar()
    }

    fn visit_u64<E: Error>(self, _: u64) -> Result<(), E> {
        self.scalar()
    }

    fn visit_f64<E: Error>(self, _: f64) -> Result<(), E> {
        self.scalar()
    }

    fn visit_str<E: Error>(self, _: &str) -> Result<(), E> {
        self.scalar()
    }

    fn visit_unit<E: Error>(self) -> Result<(), E> {
        self.scalar()
    }
}

/// Reads a key: whether it is the wanted one, or a failure on it.
struct KeySeed<'p> {
    wanted: &'p str,
    fail: bool,
}

impl<'de> DeserializeSeed<'de> for KeySeed<'_> {
    type Value = bool;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<bool, D::Error> {
        deserializer.deserialize_str(self)
    }
}

impl<'de> Visitor<'de> for KeySeed<'_> {
    type Value = bool;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a key")
    }

    fn visit_str<E: Error>(self, key: &str) -> Result<bool, E> {
        match key == self.wanted {
            true if self.fail => Err(E::custom(HERE)),
            found => Ok(found),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "a: 1\nlist:\n  - x: {y: 2,\n      z: 3}\n  - &anchor\n    x: |\n      many\n      lines\n    w: 1\nlast: *anchor\n";

    fn at(path: &[Step], key: bool) -> Option<usize> {
        line(TEXT, path, key)
    }

    fn key(k: &str) -> Step {
        Step::Key(k.to_owned())
    }

    #[test]
    fn a_value_and_a_key_are_found_on_their_lines() {
        assert_eq!(at(&[key("a")], false), Some(1));
        assert_eq!(at(&[key("list"), Step::Index(0), key("x"), key("z")], false), Some(4));
        assert_eq!(at(&[key("list"), Step::Index(1), key("w")], false), Some(9));
        assert_eq!(at(&[key("list"), Step::Index(1), key("x")], true), Some(6));
        assert_eq!(at(&[key("last")], true), Some(10));
    }

    #[test]
    fn what_is_not_there_is_placed_at_its_nearest_parent() {
        assert_eq!(at(&[key("list"), Step::Index(1), key("nothing")], false), Some(5));
        assert_eq!(at(&[key("nothing"), key("deeper")], true), Some(1));
    }

    #[test]
    fn a_path_reads_as_people_write_it() {
        assert_eq!(show(&[key("replicas"), Step::Index(0), key("url")]), "replicas[0].url");
    }
}
