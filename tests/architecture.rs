//! `docs/architecture.md` is held to what stands in `src/`.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

fn root() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
}

fn map() -> String {
    fs::read_to_string(root().join("docs/architecture.md")).expect("docs/architecture.md")
}

/// Rooms that the map's table lists.
fn rooms_on_the_map() -> BTreeSet<String> {
    map()
        .lines()
        .skip_while(|line| *line != "## Rooms")
        .take_while(|line| *line != "## How a request walks through")
        .filter_map(|line| line.strip_prefix("| `")?.split_once('`').map(|(room, _)| room.to_owned()))
        .collect()
}

/// Rooms that `src/` has: its directories, and its files but for the two entrances.
fn rooms_of_the_house() -> BTreeSet<String> {
    fs::read_dir(root().join("src"))
        .expect("src")
        .map(|entry| entry.expect("entry").path())
        .filter_map(|path| path.file_stem().map(|stem| stem.to_string_lossy().into_owned()))
        .filter(|room| room != "lib" && room != "main")
        .collect()
}

/// All Rust files of a room.
fn files(room: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in fs::read_dir(room).expect("room") {
        let path = entry.expect("entry").path();
        if path.is_dir() {
            found.extend(files(&path));
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            found.push(path);
        }
    }
    found
}

/// A file's code: without comments, and without the tests at its end, which may use what they like.
fn code(file: &Path) -> String {
    let text = fs::read_to_string(file).expect("source");
    let code = text.split("#[cfg(test)]\nmod tests {").next().unwrap_or_default();
    code.lines().filter(|line| !line.trim_start().starts_with("//")).collect::<Vec<_>>().join("\n")
}

/// Whether a file holds nothing but tests (`tests.rs`, or a directory of that name).
fn is_test(file: &Path) -> bool {
    file.components().any(|part| {
        let name = part.as_os_str().to_string_lossy();
        name == "tests" || name == "tests.rs" || name.ends_with("_tests.rs")
    })
}

fn offences(rooms: &[&str], forbidden: &[&str], allowed_files: &[&str]) -> Vec<String> {
    let mut offences = Vec::new();
    for room in rooms {
        for file in files(&root().join("src").join(room)) {
            let relative = file.strip_prefix(root()).expect("under root").to_string_lossy().into_owned();
            if allowed_files.contains(&relative.as_str()) || is_test(file.strip_prefix(root()).expect("under root")) {
                continue;
            }
            let code = code(&file);
            for word in forbidden {
                if code.contains(word) {
                    offences.push(format!("{relative} names {word}"));
                }
            }
        }
    }
    offences
}

#[test]
fn every_room_is_on_the_map_and_every_room_on_the_map_exists() {
    assert!(!rooms_on_the_map().is_empty(), "the table of rooms was not found");
    assert_eq!(rooms_on_the_map(), rooms_of_the_house());
}

#[test]
fn the_pure_rooms_know_nothing_of_pingora_but_for_the_selection() {
    let found = offences(
        &["wire", "weigh", "balance"],
        &["pingora", "crate::proxy", "crate::fleet", "crate::admin", "crate::cli"],
        &["src/balance/selection.rs"],
    );
    assert!(found.is_empty(), "{found:#?}");
}

#[test]
fn wire_and_balance_open_no_socket_and_read_no_wall_clock() {
    let found = offences(
        &["wire", "balance"],
        &["std::net::Tcp", "tokio::net", "SystemTime::now", "Instant::now", "reqwest"],
        &[],
    );
    assert!(found.is_empty(), "{found:#?}");
}

#[test]
fn nothing_uses_the_proxy_but_the_commands_that_start_it() {
    let found = offences(
        &["wire", "weigh", "balance", "fleet", "config", "observe", "admin", "sim"],
        &["crate::proxy", "crate::cli"],
        &[],
    );
    assert!(found.is_empty(), "{found:#?}");
}

#[test]
fn every_document_that_is_linked_exists() {
    let mut broken = Vec::new();
    let mut pages = vec![root().join("README.md")];
    pages.extend(fs::read_dir(root().join("docs")).expect("docs").map(|entry| entry.expect("entry").path()));
    for page in pages.iter().filter(|page| page.extension().is_some_and(|extension| extension == "md")) {
        let text = fs::read_to_string(page).expect("page");
        for target in text.split("](").skip(1).filter_map(|rest| rest.split(')').next()) {
            let file = target.split('#').next().unwrap_or_default();
            if file.is_empty() || file.contains("://") {
                continue;
            }
            if !page.parent().expect("parent").join(file).exists() {
                broken.push(format!("{} links {target}", page.display()));
            }
        }
    }
    assert!(broken.is_empty(), "{broken:#?}");
}

/// Metric names in double quotes or backquotes.
fn metric_names(text: &str, quote: char) -> BTreeSet<String> {
    text.split(quote)
        .filter(|part| part.starts_with("weighbridge_") || part.starts_with("gen_ai_server_"))
        .filter(|part| part.chars().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_'))
        .map(str::to_owned)
        .collect()
}

#[test]
fn every_metric_is_documented_and_every_documented_metric_exists() {
    let page = fs::read_to_string(root().join("docs/metrics.md")).expect("docs/metrics.md");
    let source = code(&root().join("src/observe/metrics.rs"));
    assert_eq!(metric_names(&page, '`'), metric_names(&source, '"'));
}

#[test]
fn every_test_that_the_security_page_names_exists() {
    let page = fs::read_to_string(root().join("docs/security.md")).expect("docs/security.md");
    let mut sources = String::new();
    for directory in ["src", "tests"] {
        for file in files(&root().join(directory)) {
            sources.push_str(&fs::read_to_string(file).expect("source"));
        }
    }
    let named: BTreeSet<&str> = page
        .lines()
        .filter(|line| line.starts_with("| ") && line.matches(" | ").count() == 2)
        .filter_map(|line| line.rsplit(" | ").next())
        .flat_map(|shown_by| shown_by.split('`').skip(1).step_by(2))
        .collect();
    assert!(named.len() > 20, "the table was not found");
    let missing: Vec<&&str> = named
        .iter()
        .filter(|name| !sources.contains(&format!("fn {name}(")) && !sources.contains(&format!("case!({name}, ")))
        .collect();
    assert!(missing.is_empty(), "{missing:#?}");
}

/// A page's sections by their headings, without backquotes and marks.
fn sections(page: &str) -> std::collections::BTreeMap<String, String> {
    let mut sections = std::collections::BTreeMap::new();
    let mut heading = String::new();
    for line in page.lines() {
        match line.trim_start_matches('#') {
            title if title.len() < line.len() => heading = title.trim().replace('`', ""),
            text => sections.entry(heading.clone()).or_insert_with(String::new).push_str(text),
        }
    }
    sections
}

#[test]
fn every_setting_is_documented() {
    let page = fs::read_to_string(root().join("docs/configuration.md")).expect("docs/configuration.md");
    let sections = sections(&page);
    let mut missing = Vec::new();
    for (table, keys) in weighbridge::config::TABLES {
        let heading = if table.is_empty() { "The document" } else { table };
        match sections.get(heading) {
            None => missing.push(format!("a section {heading}")),
            Some(text) => missing.extend(
                keys.iter().filter(|key| !text.contains(&format!("`{key}`"))).map(|key| format!("{heading}: {key}")),
            ),
        }
    }
    assert!(missing.is_empty(), "{missing:#?}");
}
