//! Chat templates, rendered as Hugging Face renders them: Jinja2's sandbox with trimmed blocks, Python's printing,
//! and bounds on work and output.
//!
//! Jinja2 and minijinja differ in a few places that templates touch: how values print (`None`, `True`, floats, lists
//! of strings), `tojson`, and whether null is iterable. Those are replaced here; the rest is minijinja's.

pub mod dict;
pub mod format;
pub mod python;

use std::fmt;
use std::sync::Arc;

use chrono::NaiveDateTime;
use minijinja::syntax::SyntaxConfig;
use minijinja::value::Value;
use minijinja::{Environment, Error, ErrorKind};

use crate::config::ContentFormat;

/// Local wall-clock time, for templates that print the date. Passed in, so that a test can hold it still.
pub type WallClock = Arc<dyn Fn() -> NaiveDateTime + Send + Sync>;

/// The machine's local time.
pub fn local_time() -> WallClock {
    Arc::new(|| chrono::Local::now().naive_local())
}

/// Work allowed to a rendering, in minijinja's fuel (an instruction, or 64 bytes made; some 20 ns), by the request's
/// length in bytes. The smallest message that JSON can hold is 30 bytes and costs a template 100 to 200 instructions.
const FUEL: [(usize, u64); 3] = [(64 << 10, 600_000), (512 << 10, 3_000_000), (usize::MAX, 8_000_000)];
/// Rendered output may be this much more than the request's own bytes, which it may also repeat a few times.
const OUTPUT_BASE_MAX: usize = 1 << 20;
const OUTPUT_TIMES_MAX: usize = 8;

/// Why a template gave no prompt.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum RenderError {
    /// The template's own `raise_exception`: the conversation is refused, with the template's words.
    #[error("{0}")]
    Raised(String),
    /// Anything else: a missing function, too much work or output. The prompt is then estimated.
    #[error("chat template failed: {0}")]
    Failed(String),
}

/// What `raise_exception` leaves on the error's way out.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
struct Raised(String);

/// A model's chat templates, compiled once.
pub struct Templates {
    /// One environment for each step of [`FUEL`].
    envs: [Environment<'static>; FUEL.len()],
    named: Vec<Named>,
    /// `bos_token` and its kin, as template variables.
    specials: Vec<(Value, Value)>,
}

struct Named {
    name: String,
    /// It takes content as a list of parts.
    parts: bool,
    /// It speaks of reasoning.
    reasons: bool,
}

impl fmt::Debug for Templates {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names: Vec<&str> = self.named.iter().map(|n| n.name.as_str()).collect();
        f.debug_struct("Templates").field("names", &names).finish_non_exhaustive()
    }
}

impl Templates {
    /// Compiles templates by name (`default` where there is one alone); `specials` become variables of each.
    ///
    /// # Errors
    /// What the template language does not understand, with the line.
    pub fn new(
        named: Vec<(String, String)>,
        specials: Vec<(String, String)>,
        clock: WallClock,
    ) -> Result<Templates, String> {
        let mut env = Environment::new();
        let syntax = SyntaxConfig::builder()
            .trim_blocks(true)
            .lstrip_blocks(true)
            .build()
            .map_err(|e| format!("template syntax: {e}"))?;
        env.set_syntax(syntax);
        env.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
        env.set_formatter(|out, _state, value| match value.as_str() {
            Some(text) => out.write_str(text).map_err(Error::from),
            None => out.write_str(&python::str_of(value)?).map_err(Error::from),
        });
        env.add_filter("tojson", python::tojson);
        env.add_filter("string", |value: &Value| python::str_of(value).map(Value::from));
        env.add_test("iterable", |value: &Value| !value.is_none() && value.try_iter().is_ok());
        env.add_function("raise_exception", |text: String| -> Result<Value, Error> {
            Err(Error::new(ErrorKind::InvalidOperation, text.clone()).with_source(Raised(text)))
        });
        env.add_function("strftime_now", move |format: String| strftime(&clock, &format));
        let mut compiled = Vec::with_capacity(named.len());
        for (name, source) in named {
            let text = without_generation_tags(&source);
            env.add_template_owned(name.clone(), text)
                .map_err(|e| format!("chat template \"{name}\", line {}: {e}", e.line().unwrap_or(0)))?;
            let parts = format::wants_parts(&source);
            let reasons = source.contains("enable_thinking") || source.contains("reasoning_effort");
            compiled.push(Named { name, parts, reasons });
        }
        if compiled.is_empty() {
            return Err("no chat template".to_owned());
        }
        let specials = specials.into_iter().map(|(k, v)| (Value::from(k), Value::from(v))).collect();
        let envs = FUEL.map(|(_, fuel)| {
            let mut env = env.clone();
            env.set_fuel(Some(fuel));
            env
        });
        Ok(Templates { envs, named: compiled, specials })
    }

    /// The template for a request: `tool_use` for tools where it is there, else `default`, else the first.
    fn pick(&self, tools: bool) -> &Named {
        let by_name = |name: &str| self.named.iter().find(|n| n.name == name);
        let tool_use = if tools { by_name("tool_use") } else { None };
        tool_use.or_else(|| by_name("default")).unwrap_or(&self.named[0])
    }

    /// Whether content goes to the template as a list of parts.
    pub fn takes_parts(&self, configured: ContentFormat, tools: bool) -> bool {
        match configured {
            ContentFormat::Auto => self.pick(tools).parts,
            ContentFormat::String => false,
            ContentFormat::Parts => true,
        }
    }

    /// Whether the template has a switch for reasoning, which is on where nobody touches it.
    pub fn reasons(&self) -> bool {
        self.pick(false).reasons
    }

    /// Renders. `variables` win over the special tokens; `bytes` is the request's length, which bounds work and output.
    ///
    /// # Errors
    /// [`RenderError::Raised`] where the template refuses the conversation, else [`RenderError::Failed`].
    pub fn render(&self, tools: bool, mut variables: Vec<(Value, Value)>, bytes: usize) -> Result<String, RenderError> {
        let named = self.pick(tools);
        // Behind the others: of two with one name the first is found.
        variables.extend(self.specials.iter().cloned());
        let context = dict::Entries(variables).into_first_of_each();
        let step = FUEL.iter().position(|(length, _)| bytes <= *length).unwrap_or(FUEL.len() - 1);
        let template = self.envs[step].get_template(&named.name).map_err(failed)?;
        let text = template.render(context).map_err(failed)?;
        if text.len() > OUTPUT_BASE_MAX + OUTPUT_TIMES_MAX * bytes {
            return Err(RenderError::Failed(format!("{} bytes rendered from {bytes}", text.len())));
        }
        Ok(text)
    }
}

fn failed(error: Error) -> RenderError {
    let mut source: Option<&dyn std::error::Error> = Some(&error);
    while let Some(inner) = source {
        if let Some(raised) = inner.downcast_ref::<Raised>() {
            return RenderError::Raised(raised.0.clone());
        }
        source = inner.source();
    }
    RenderError::Failed(error.to_string())
}

fn strftime(clock: &WallClock, format: &str) -> Result<String, Error> {
    use chrono::format::{Item, StrftimeItems};
    let items: Vec<Item<'_>> = StrftimeItems::new(format).collect();
    if items.contains(&Item::Error) {
        return Err(Error::new(ErrorKind::InvalidOperation, format!("strftime_now: unknown format {format:?}")));
    }
    Ok(clock().format_with_items(items.into_iter()).to_string())
}

/// Hugging Face's `generation` block marks spans and prints nothing: a condition that always holds does the same,
/// blanks included.
fn without_generation_tags(source: &str) -> String {
    let mut out = String::with_capacity(source.len());
    let mut rest = source;
    while let Some(at) = rest.find("{%") {
        // Behind the opening: `{%}` opens and does not close.
        let Some(len) = rest[at + 2..].find("%}").map(|len| len + 2) else { break };
        let tag = &rest[at..at + len + 2];
        let inner = tag[2..tag.len() - 2].trim_start_matches(['-', '+']).trim_end_matches(['-', '+']).trim();
        out.push_str(&rest[..at]);
        match inner {
            "generation" => out.push_str(&tag.replacen("generation", "if true", 1)),
            "endgeneration" => out.push_str(&tag.replacen("endgeneration", "endif", 1)),
            _ => out.push_str(tag),
        }
        rest = &rest[at + len + 2..];
    }
    out.push_str(rest);
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn generation_tags_print_nothing_and_half_a_tag_is_no_tag() {
        let source = "a{%- generation %}b{% endgeneration -%}c{% if x %}";
        assert_eq!(without_generation_tags(source), "a{%- if true %}b{% endif -%}c{% if x %}");
        for odd in ["{%}", "{%", "{%}%}", "{%-%}", "a{%}b{% generation"] {
            assert_eq!(without_generation_tags(odd), odd);
        }
    }
}
