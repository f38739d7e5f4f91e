//! Escapes foreign texts, so that they cannot become markup.

/// Escapes a text for the content of an element or of a quoted attribute.
pub fn escape(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for character in text.chars() {
        match character {
            '&' => escaped.push_str("&amp;"),
            '<' => escaped.push_str("&lt;"),
            '>' => escaped.push_str("&gt;"),
            '"' => escaped.push_str("&quot;"),
            '\'' => escaped.push_str("&#39;"),
            // Characters that change the writing direction, or are invisible, are shown as codes.
            '\u{200e}' | '\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}' | '\0' => {
                escaped.push('\u{fffd}');
            }
            _ => escaped.push(character),
        }
    }
    escaped
}

/// Escapes JSON for the content of a script element, which ends at the first `</script`.
pub(crate) fn in_script(json: &serde_json::Value) -> String {
    json.to_string().replace('<', "\\u003c")
}

#[cfg(test)]
mod tests {
    use super::{escape, in_script};

    #[test]
    fn nothing_of_a_text_becomes_markup() {
        assert_eq!(escape("<b a='1' c=\"2\">&"), "&lt;b a=&#39;1&#39; c=&quot;2&quot;&gt;&amp;");
        assert_eq!(escape("web\u{202e}1"), "web\u{fffd}1");
        assert_eq!(in_script(&serde_json::json!(["</script>"])), r#"["\u003c/script>"]"#);
    }
}
