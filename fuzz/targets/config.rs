//! Any text as a configuration: read or refused, never a panic; every fault is told in few words, and what is read is
//! read the same again.

#![no_main]

use std::path::Path;

use libfuzzer_sys::fuzz_target;
use weighbridge::config::{diff, digest, parse};

fuzz_target!(|input: &[u8]| {
    let Ok(text) = std::str::from_utf8(input) else { return };
    // A configuration may name files, which are opened; devices without an end are no business of the parser's.
    if ["/dev", "/proc", "/sys"].iter().any(|place| text.contains(place)) {
        return;
    }
    match parse(text, Path::new("/nonexistent")) {
        Ok(config) => {
            let again = parse(text, Path::new("/nonexistent")).expect("what was read once is read again");
            assert!(diff(&digest(&config), &digest(&again)).is_empty(), "nothing changed");
        }
        Err(faults) => {
            assert!(!faults.0.is_empty(), "a refusal has a reason");
            for fault in &faults.0 {
                assert!(fault.to_string().len() < 4000 + input.len(), "a fault is told in few words");
            }
        }
    }
});
