//! `hub:ORG/REPO`: Hugging Face's cache on this machine first, else a download into it.

use std::path::{Path, PathBuf};
use std::time::Duration;

/// Where the hub is and where its cache is.
#[derive(Clone, Debug)]
pub struct Hub {
    pub endpoint: String,
    pub token: Option<String>,
    /// The directory with `models--ORG--REPO` in it.
    pub cache: PathBuf,
}

/// Files that are fetched where they are there; of the first two, one must be.
const FILES: [&str; 8] = [
    "tokenizer.json",
    "tekken.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "chat_template.json",
    "config.json",
    "preprocessor_config.json",
];
/// The largest file taken: Gemma 3's tokenizer has 33 MB.
const FILE_BYTES_MAX: usize = 128 << 20;
/// For one file, connecting included.
const FETCH_TIMEOUT: Duration = Duration::from_secs(120);

impl Hub {
    /// As `HF_ENDPOINT`, `HF_TOKEN`, `HF_HUB_CACHE`, `HF_HOME` and `XDG_CACHE_HOME` say.
    pub fn from_env() -> Hub {
        let var = |name: &str| std::env::var(name).ok().filter(|value| !value.is_empty());
        let home = var("HF_HOME").map(PathBuf::from).unwrap_or_else(|| {
            let cache = var("XDG_CACHE_HOME").map(PathBuf::from);
            let cache = cache.unwrap_or_else(|| PathBuf::from(var("HOME").unwrap_or_default()).join(".cache"));
            cache.join("huggingface")
        });
        let token_file = || std::fs::read_to_string(home.join("token")).ok().map(|token| token.trim().to_owned());
        Hub {
            endpoint: var("HF_ENDPOINT").unwrap_or_else(|| "https://huggingface.co".to_owned()),
            token: var("HF_TOKEN").or_else(token_file).filter(|token| !token.is_empty()),
            cache: var("HF_HUB_CACHE").map(PathBuf::from).unwrap_or_else(|| home.join("hub")),
        }
    }
}

/// The directory of a repository's files. Blocks for a download: never on the event loop.
///
/// # Errors
/// A name that is no repository's, what the hub answered, or what could not be written.
pub fn fetch(repo: &str, hub: &Hub) -> Result<PathBuf, String> {
    let plain = |part: &str| {
        !part.is_empty()
            && !part.starts_with('.')
            && part.bytes().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_' | b'.'))
    };
    let valid = repo.split('/').count() <= 2 && repo.split('/').all(plain);
    if !valid {
        return Err(format!("hub:{repo} is no repository; write hub:ORG/REPO"));
    }
    let place = hub.cache.join(format!("models--{}", repo.replace('/', "--")));
    if let Some(known) = cached(&place) {
        return Ok(known);
    }
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(|e| e.to_string())?;
    runtime.block_on(download(repo, hub, &place))
}

/// The snapshot that `refs/main` names, if it holds a tokenizer.
fn cached(place: &Path) -> Option<PathBuf> {
    let commit = std::fs::read_to_string(place.join("refs").join("main")).ok()?;
    let snapshot = place.join("snapshots").join(commit.trim());
    FILES[..2].iter().any(|file| snapshot.join(file).exists()).then_some(snapshot)
}

async fn download(repo: &str, hub: &Hub, place: &Path) -> Result<PathBuf, String> {
    let client = reqwest::Client::builder().timeout(FETCH_TIMEOUT).build().map_err(|e| e.to_string())?;
    let mut commit: Option<String> = None;
    let mut files: Vec<(&str, Vec<u8>)> = Vec::new();
    for file in FILES {
        let endpoint = hub.endpoint.trim_end_matches('/');
        let url = format!("{endpoint}/{repo}/resolve/main/{file}");
        let mut ask = client.get(&url);
        if let Some(token) = &hub.token {
            ask = ask.bearer_auth(token);
        }
        let mut answer = ask.send().await.map_err(|e| format!("{url}: {e}"))?;
        match answer.status().as_u16() {
            200 => {}
            404 => continue,
            401 | 403 => return Err(format!("{url}: {}; set HF_TOKEN to a token that may read it", answer.status())),
            _ => return Err(format!("{url}: {}", answer.status())),
        }
        let named = answer.headers().get("x-repo-commit").and_then(|value| value.to_str().ok());
        let hex = |name: &&str| (7..=64).contains(&name.len()) && name.bytes().all(|b| b.is_ascii_hexdigit());
        commit = commit.or_else(|| named.filter(hex).map(str::to_owned));
        let mut bytes = Vec::new();
        while let Some(chunk) = answer.chunk().await.map_err(|e| format!("{url}: {e}"))? {
            if bytes.len() + chunk.len() > FILE_BYTES_MAX {
                return Err(format!("{url}: larger than {FILE_BYTES_MAX} bytes"));
            }
            bytes.extend_from_slice(&chunk);
        }
        files.push((file, bytes));
    }
    if !files.iter().any(|(name, _)| FILES[..2].contains(name)) {
        return Err(format!("{}/{repo}: no tokenizer.json and no tekken.json there", hub.endpoint));
    }
    let commit = commit.unwrap_or_else(|| "main".to_owned());
    let snapshot = place.join("snapshots").join(&commit);
    // The tokenizer is written last and the reference after it: a snapshot that is named is whole.
    files.reverse();
    for (name, bytes) in files {
        write(&snapshot.join(name), &bytes)?;
    }
    write(&place.join("refs").join("main"), commit.as_bytes())?;
    Ok(snapshot)
}

/// Writes a file whole or not at all.
fn write(path: &Path, bytes: &[u8]) -> Result<(), String> {
    let told = |e: std::io::Error| format!("{}: {e}", path.display());
    if let Some(dir) = path.parent() {
        std::fs::create_dir_all(dir).map_err(told)?;
    }
    let part = path.with_extension(format!("part-{}", std::process::id()));
    std::fs::write(&part, bytes).map_err(told)?;
    std::fs::rename(&part, path).map_err(told)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::{Arc, Mutex};

    /// A hub on loopback that serves `files` and notes what it is asked.
    fn mirror(files: &'static [(&'static str, &'static str)]) -> (String, Arc<Mutex<Vec<String>>>) {
        use std::io::{Read, Write};
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let asked = Arc::new(Mutex::new(Vec::new()));
        let notes = Arc::clone(&asked);
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                let mut stream = stream.unwrap();
                let mut head = Vec::new();
                let mut byte = [0];
                while !head.ends_with(b"\r\n\r\n") && stream.read(&mut byte).unwrap_or(0) > 0 {
                    head.push(byte[0]);
                }
                let head = String::from_utf8_lossy(&head).to_lowercase();
                let path = head.split(' ').nth(1).unwrap_or_default().to_owned();
                let authorised = head.contains("authorization: bearer secret");
                notes.lock().unwrap().push(path.clone());
                let found = files.iter().find(|(name, _)| path.ends_with(&format!("/org/model/resolve/main/{name}")));
                let answer = match found {
                    _ if !authorised => "HTTP/1.1 401 No\r\ncontent-length: 0\r\nconnection: close\r\n\r\n".to_owned(),
                    None => "HTTP/1.1 404 No\r\ncontent-length: 0\r\nconnection: close\r\n\r\n".to_owned(),
                    Some((_, body)) => format!(
                        "HTTP/1.1 200 OK\r\nx-repo-commit: 0123456789abcdef\r\ncontent-length: {}\r\nconnection: close\r\n\r\n{body}",
                        body.len()
                    ),
                };
                let _ = stream.write_all(answer.as_bytes());
            }
        });
        (format!("http://{address}"), asked)
    }

    #[test]
    fn a_repository_is_downloaded_once_into_the_cache_s_own_layout() {
        let (endpoint, asked) = mirror(&[("tokenizer.json", "{}"), ("chat_template.jinja", "{{ messages }}")]);
        let dir = tempfile::tempdir().unwrap();
        let hub = Hub { endpoint, token: Some("secret".to_owned()), cache: dir.path().to_owned() };
        let first = fetch("org/model", &hub).unwrap();
        assert!(first.ends_with("models--org--model/snapshots/0123456789abcdef"));
        assert_eq!(std::fs::read_to_string(first.join("chat_template.jinja")).unwrap(), "{{ messages }}");
        let calls = asked.lock().unwrap().len();
        assert_eq!(fetch("org/model", &hub).unwrap(), first);
        assert_eq!(asked.lock().unwrap().len(), calls, "the second time nothing is asked");
    }

    #[test]
    fn a_refused_token_and_a_missing_tokenizer_are_told_apart() {
        let (endpoint, _) = mirror(&[("config.json", "{}")]);
        let dir = tempfile::tempdir().unwrap();
        let hub = |token: &str| Hub {
            endpoint: endpoint.clone(),
            token: Some(token.to_owned()),
            cache: dir.path().to_owned(),
        };
        assert!(fetch("org/model", &hub("wrong")).unwrap_err().contains("HF_TOKEN"));
        assert!(fetch("org/model", &hub("secret")).unwrap_err().contains("no tokenizer.json"));
    }

    #[test]
    fn names_that_would_leave_the_cache_are_refused() {
        let hub = Hub { endpoint: "http://127.0.0.1:9".to_owned(), token: None, cache: PathBuf::from("/nowhere") };
        for name in ["../../etc", "a/b/c", "", "a//b", ".hidden/x"] {
            assert!(fetch(name, &hub).unwrap_err().contains("is no repository"), "{name}");
        }
    }
}
