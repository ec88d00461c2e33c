//! What is wrong with a configuration, said to the person who wrote it.

use std::fmt;

/// One fault: where it is, what was found, what is allowed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConfigError {
    /// The file as the caller named it.
    pub file: String,
    /// From 1; `None` where the fault has no place in the file (it cannot be read, say).
    pub line: Option<usize>,
    /// The key path, `replicas[0].url`; empty for the whole file.
    pub path: String,
    /// What was found.
    pub problem: String,
    /// What is allowed instead.
    pub allowed: Option<String>,
}

impl fmt::Display for ConfigError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.file)?;
        if let Some(line) = self.line {
            write!(f, ":{line}")?;
        }
        f.write_str(": ")?;
        if !self.path.is_empty() {
            write!(f, "{}: ", self.path)?;
        }
        f.write_str(&self.problem)?;
        match &self.allowed {
            Some(allowed) => write!(f, "; allowed: {allowed}"),
            None => Ok(()),
        }
    }
}

/// Every fault of a configuration, in the order of their lines. Never empty.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Errors(pub Vec<ConfigError>);

impl Errors {
    pub(super) fn one(file: &str, line: Option<usize>, problem: String, allowed: Option<String>) -> Errors {
        Errors(vec![ConfigError { file: file.to_owned(), line, path: String::new(), problem, allowed }])
    }
}

impl fmt::Display for Errors {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, error) in self.0.iter().enumerate() {
            if i > 0 {
                f.write_str("\n")?;
            }
            fmt::Display::fmt(error, f)?;
        }
        Ok(())
    }
}

impl std::error::Error for Errors {}
