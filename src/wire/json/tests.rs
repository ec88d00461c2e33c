use proptest::prelude::*;

use super::*;

fn check(text: &[u8]) -> Result<()> {
    let mut cursor = Cursor::new(text, 0, 128);
    cursor.skip()?;
    cursor.end()
}

#[test]
fn it_accepts_and_refuses_what_rfc_8259_does() {
    for good in [
        "{}",
        "[]",
        " [ ] ",
        "0",
        "-0",
        "1.5e+10",
        "1E5",
        "\"\"",
        "\"\\u00e9\\n\"",
        "\"\\ud83d\\ude00\"",
        "null",
        "[1,2,[3,{\"a\":{}}]]",
        "{\"a\":1,\"b\":[true,false,null]}\r\n\t ",
        "\"\u{7f}é漢\"",
        "1e309",
    ] {
        assert_eq!(check(good.as_bytes()), Ok(()), "{good}");
    }
    for bad in [
        "",
        " ",
        "{",
        "[",
        "[1,]",
        "[,1]",
        "{,}",
        "{\"a\":1,}",
        "{\"a\"}",
        "{\"a\":}",
        "{a:1}",
        "01",
        "1.",
        ".5",
        "+1",
        "-",
        "1e",
        "1e+",
        "tru",
        "nul",
        "NaN",
        "Infinity",
        "\"",
        "\"\\x\"",
        "\"\\u12\"",
        "\"\\u12g4\"",
        "\"\n\"",
        "\"\u{1}\"",
        "[1 2]",
        "{\"a\":1 \"b\":2}",
        "[}",
        "{]",
        "[1}",
        "{\"a\":1]",
        "1 2",
        "{}}",
        "\"\\ud800\"",
        "\"\\udc00\\ud800\"",
        "\"\\ud800\\ud800\"",
        "'a'",
        "// c\n1",
        "\"\\",
    ] {
        assert!(check(bad.as_bytes()).is_err(), "{bad}");
    }
}

#[test]
fn depth_is_counted_exactly_and_never_recurses() {
    let nested = |n: usize| [vec![b'['; n], vec![b']'; n]].concat();
    assert!(check(&nested(128)).is_ok());
    assert_eq!(check(&nested(129)).unwrap_err(), JsonError { at: 128, fault: Fault::Depth(128) });
    assert!(check(&nested(1_000_000)).is_err());
    let objects = |n: usize| ["{\"a\":".repeat(n).as_bytes(), b"1", "}".repeat(n).as_bytes()].concat();
    assert!(check(&objects(128)).is_ok());
    assert!(check(&objects(129)).is_err());
    let mut deep = Cursor::new(b"", 0, usize::MAX);
    assert_eq!(deep.depth_left, DEPTH_MAX);
    assert!(deep.skip().is_err());
}

#[test]
fn a_control_character_far_into_a_long_string_is_found() {
    for at in [0, 7, 8, 63, 64, 65, 300, 1000] {
        let mut text = vec![b'a'; 1001];
        text[at] = b'\n';
        let quoted = [b"\"".as_slice(), &text, b"\""].concat();
        assert_eq!(check(&quoted).unwrap_err(), JsonError { at: at + 1, fault: Fault::Control });
    }
}

#[test]
fn counts_are_whole_numbers_only() {
    assert_eq!(count(b"12"), Some(12));
    assert_eq!(count(b"12.0"), Some(12));
    assert_eq!(count(b"0"), Some(0));
    assert_eq!(count(b"18446744073709551615"), Some(u64::MAX));
    for not in ["18446744073709551616", "-1", "1.5", "\"10\"", "true", "1e309", "1e3", "null", "", "1."] {
        assert_eq!(count(not.as_bytes()), None, "{not}");
    }
}

proptest! {
    #[test]
    fn it_agrees_with_serde_json_on_any_text(text in r#"[\[\]{}",:0-9eE.+\-truefalsn\\ u]{0,40}"#) {
        // serde_json refuses numbers past f64's range where the grammar does not.
        let theirs = serde_json::from_str::<Box<serde_json::value::RawValue>>(&text);
        prop_assert_eq!(check(text.as_bytes()).is_ok(), theirs.is_ok(), "{}", text);
    }

    #[test]
    fn it_accepts_every_string_that_serde_json_writes(text in any::<String>(), pad in 0usize..200) {
        let padded = format!("{}{text}", "x".repeat(pad));
        let json = serde_json::to_string(&padded).unwrap();
        let mut cursor = Cursor::new(json.as_bytes(), 0, 1);
        let found = cursor.text().unwrap();
        prop_assert_eq!(cursor.pos(), json.len());
        prop_assert_eq!(unescape(cursor.slice(&found.inner), found.escaped), padded);
    }

    #[test]
    fn the_word_test_agrees_with_a_byte_loop(bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
        let slow = bytes.iter().position(|&b| b == b'"' || b == b'\\' || b < 0x20).unwrap_or(bytes.len());
        prop_assert_eq!(special(&bytes, 0), slow);
    }
}
