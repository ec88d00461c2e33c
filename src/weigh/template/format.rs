//! Whether a template wants message content as text or as a list of parts.
//!
//! vLLM's rule: a template that loops over a message's content gets the list, any other gets text. It looks at the
//! syntax tree; the same loops are found here in the tags' text.

/// Whether the template loops over a message's content (or over a variable or macro parameter that holds it).
pub fn wants_parts(source: &str) -> bool {
    let mut holders: Vec<String> = vec!["content".to_owned()];
    for tag in tags(source) {
        if let Some(rest) = tag.strip_prefix("set ")
            && let Some((name, value)) = rest.split_once('=')
            && is_content(value, &holders)
        {
            holders.push(name.trim().to_owned());
        }
        if let Some(rest) = tag.strip_prefix("for ")
            && let Some((_, iterated)) = rest.split_once(" in ")
            && is_content(iterated, &holders)
        {
            return true;
        }
    }
    false
}

/// The insides of `{% … %}` tags, without whitespace control.
fn tags(source: &str) -> impl Iterator<Item = &str> {
    source.split("{%").skip(1).filter_map(|piece| {
        let (tag, _) = piece.split_once("%}")?;
        Some(tag.trim_start_matches(['-', '+']).trim_end_matches(['-', '+']).trim())
    })
}

/// Whether an expression is a message's content, before filters and conditions.
fn is_content(expression: &str, holders: &[String]) -> bool {
    let head = expression.split('|').next().unwrap_or_default();
    let head = head.split(" if ").next().unwrap_or_default().trim();
    head.ends_with(".content")
        || head.ends_with("['content']")
        || head.ends_with("[\"content\"]")
        || holders.iter().any(|holder| holder == head)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_loop_over_content_asks_for_parts_and_printing_it_for_text() {
        assert!(wants_parts(
            "{% for m in messages %}{%- for c in m['content'] -%}{{ c.text }}{% endfor %}{% endfor %}"
        ));
        assert!(wants_parts("{% set content = message.content %}{% for item in content %}x{% endfor %}"));
        assert!(wants_parts(
            "{% set body = m[\"content\"] %}{% for item in body if item.type == 'text' %}x{% endfor %}"
        ));
        assert!(!wants_parts("{% for m in messages %}{{ m.content }}{% endfor %}"));
        assert!(!wants_parts("{% set content = m.content %}{% for t in m.tool_calls %}{{ content }}{% endfor %}"));
    }
}
