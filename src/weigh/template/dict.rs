//! JSON objects as template values: insertion order, few keys, no hashing.

use std::sync::Arc;

use minijinja::value::{Enumerator, Object, Value};
use serde::de::{self, Deserialize, DeserializeSeed, Deserializer, MapAccess, SeqAccess, Visitor};

/// Objects with more keys than this become hash maps, so that no client can make lookups slow.
const LINEAR_KEYS_MAX: usize = 16;

/// A small JSON object; lookups walk its keys.
#[derive(Debug, Default)]
pub struct Dict {
    entries: Vec<(Value, Value)>,
}

impl Object for Dict {
    fn get_value(self: &Arc<Self>, key: &Value) -> Option<Value> {
        self.get_value_by_str(key.as_str()?)
    }

    fn get_value_by_str(self: &Arc<Self>, key: &str) -> Option<Value> {
        self.entries.iter().find(|(name, _)| name.as_str() == Some(key)).map(|(_, value)| value.clone())
    }

    fn enumerate(self: &Arc<Self>) -> Enumerator {
        let this = Arc::clone(self);
        let indices = 0..self.entries.len();
        Enumerator::KeyValueIter(Box::new(indices.map(move |i| this.entries[i].clone())))
    }

    fn enumerator_len(self: &Arc<Self>) -> Option<usize> {
        Some(self.entries.len())
    }
}

/// A JSON object being put together; a repeated key replaces its value and keeps its place, as in Python.
#[derive(Debug, Default)]
pub struct Entries(pub Vec<(Value, Value)>);

impl Entries {
    /// The value under `key`.
    pub fn get(&self, key: &str) -> Option<&Value> {
        self.0.iter().find(|(name, _)| name.as_str() == Some(key)).map(|(_, value)| value)
    }

    /// Sets `key`, in place where it is there already.
    pub fn set(&mut self, key: &str, value: Value) {
        match self.0.iter_mut().find(|(name, _)| name.as_str() == Some(key)) {
            Some(entry) => entry.1 = value,
            None => self.0.push((Value::from(key), value)),
        }
    }

    /// Removes `key`.
    pub fn remove(&mut self, key: &str) {
        self.0.retain(|(name, _)| name.as_str() != Some(key));
    }

    /// Adds a member read from JSON.
    pub fn read(&mut self, key: &str, value: Value) {
        if self.0.len() <= LINEAR_KEYS_MAX {
            self.set(key, value);
        } else {
            // The map made of these keeps the last of two values itself.
            self.0.push((Value::from(key), value));
        }
    }

    /// The finished template value.
    pub fn into_value(self) -> Value {
        if self.0.len() <= LINEAR_KEYS_MAX {
            Value::from_object(Dict { entries: self.0 })
        } else {
            Value::from_pairs(self.0)
        }
    }

    /// As [`Entries::into_value`], where of two members with one name the first counts.
    pub fn into_first_of_each(mut self) -> Value {
        if self.0.len() > LINEAR_KEYS_MAX {
            // A map keeps the last; lookups that walk find the first by themselves.
            self.0.reverse();
        }
        self.into_value()
    }

    /// The members of a template map.
    pub fn of(map: &Value) -> Entries {
        match map.as_object().and_then(|object| object.try_iter_pairs()) {
            Some(pairs) => Entries(pairs.collect()),
            None => Entries::default(),
        }
    }
}

/// Any JSON value, read straight into a template value.
#[derive(Clone, Copy, Debug)]
pub struct Json;

/// A JSON value in a place where serde wants a type.
#[derive(Debug)]
pub struct JsonValue(pub Value);

impl<'de> Deserialize<'de> for JsonValue {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        Json.deserialize(deserializer).map(JsonValue)
    }
}

impl<'de> DeserializeSeed<'de> for Json {
    type Value = Value;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Value, D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Json {
    type Value = Value;

    fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("a JSON value")
    }

    fn visit_bool<E: de::Error>(self, v: bool) -> Result<Value, E> {
        Ok(Value::from(v))
    }

    fn visit_i64<E: de::Error>(self, v: i64) -> Result<Value, E> {
        Ok(Value::from(v))
    }

    fn visit_u64<E: de::Error>(self, v: u64) -> Result<Value, E> {
        Ok(Value::from(v))
    }

    fn visit_f64<E: de::Error>(self, v: f64) -> Result<Value, E> {
        Ok(Value::from(v))
    }

    fn visit_str<E: de::Error>(self, v: &str) -> Result<Value, E> {
        Ok(Value::from(v))
    }

    fn visit_unit<E: de::Error>(self) -> Result<Value, E> {
        Ok(Value::from(()))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Value, A::Error> {
        let mut items: Vec<Value> = Vec::new();
        while let Some(item) = seq.next_element_seed(Json)? {
            items.push(item);
        }
        Ok(Value::from(items))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Value, A::Error> {
        let mut entries = Entries::default();
        while let Some(key) = map.next_key::<Key<'de>>()? {
            let value = map.next_value_seed(Json)?;
            entries.read(&key.0, value);
        }
        Ok(entries.into_value())
    }
}

/// A member's name, borrowed where it holds no escape.
#[derive(Debug)]
pub struct Key<'de>(pub std::borrow::Cow<'de, str>);

impl<'de> Deserialize<'de> for Key<'de> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct KeyVisitor;
        impl<'de> Visitor<'de> for KeyVisitor {
            type Value = Key<'de>;

            fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str("a member's name")
            }

            fn visit_borrowed_str<E: de::Error>(self, v: &'de str) -> Result<Key<'de>, E> {
                Ok(Key(v.into()))
            }

            fn visit_str<E: de::Error>(self, v: &str) -> Result<Key<'de>, E> {
                Ok(Key(v.to_owned().into()))
            }
        }
        deserializer.deserialize_str(KeyVisitor)
    }
}

/// Reads one JSON text into a template value.
///
/// # Errors
/// Where the text is no JSON, or nested deeper than 128.
pub fn from_json(text: &[u8]) -> Result<Value, serde_json::Error> {
    serde_json::from_slice::<JsonValue>(text).map(|value| value.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_repeated_key_keeps_its_place_and_takes_the_last_value() {
        let value = from_json(br#"{"a": 1, "b": 2, "a": 3}"#).unwrap();
        let pairs: Vec<(String, i64)> =
            Entries::of(&value).0.into_iter().map(|(k, v)| (k.to_string(), v.as_i64().unwrap())).collect();
        assert_eq!(pairs, [("a".to_owned(), 3), ("b".to_owned(), 2)]);
    }

    #[test]
    fn the_first_of_two_variables_counts_however_many_there_are() {
        for others in [0, 100] {
            let mut entries: Vec<(Value, Value)> =
                (0..others).map(|i| (Value::from(format!("k{i}")), Value::from(i))).collect();
            entries.insert(0, (Value::from("a"), Value::from(1)));
            entries.push((Value::from("a"), Value::from(2)));
            assert_eq!(Entries(entries).into_first_of_each().get_attr("a").unwrap().as_i64(), Some(1));
        }
    }

    #[test]
    fn large_objects_answer_lookups_too() {
        let text = format!("{{{}}}", (0..500).map(|i| format!("\"k{i}\": {i}")).collect::<Vec<_>>().join(","));
        let value = from_json(text.as_bytes()).unwrap();
        assert_eq!(value.get_attr("k499").unwrap().as_i64(), Some(499));
        assert_eq!(Entries::of(&value).0.len(), 500);
    }
}
