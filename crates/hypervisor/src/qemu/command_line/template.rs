//! Words of a command with variables in them: `path={disk:root},x=1`.
//!
//! A variable is a word of small letters in braces, with or without a name behind a colon. Other braces belong to the command,
//! because QEMU takes JSON. Values are escaped as the word around them requires.

/// One word of a command, split at its variables.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Template {
    pieces: Vec<Piece>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Piece {
    Text(String),
    Variable(Variable),
}

/// A variable of a template.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Variable {
    /// The kind of its value, such as `disk`.
    pub kind: String,
    /// The name of its value; empty if there is only one.
    pub name: String,
}

impl std::fmt::Display for Variable {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.name.as_str() {
            "" => write!(formatter, "{{{}}}", self.kind),
            name => write!(formatter, "{{{}:{name}}}", self.kind),
        }
    }
}

impl Template {
    /// Splits a word at its variables.
    pub fn parse(word: &str) -> Self {
        let (mut pieces, mut text, mut rest) = (Vec::new(), String::new(), word);
        while let Some(start) = rest.find('{') {
            let (before, from) = rest.split_at(start);
            text.push_str(before);
            let inner = from[1..].split_once('}').and_then(|(inner, after)| Some((variable(inner)?, after)));
            match inner {
                Some((variable, after)) => {
                    pieces.push(Piece::Text(std::mem::take(&mut text)));
                    pieces.push(Piece::Variable(variable));
                    rest = after;
                }
                None => {
                    text.push('{');
                    rest = &from[1..];
                }
            }
        }
        text.push_str(rest);
        pieces.push(Piece::Text(text));
        pieces.retain(|piece| *piece != Piece::Text(String::new()));
        Self { pieces }
    }

    /// Returns whether it begins with a variable.
    pub fn begins_with_variable(&self) -> bool {
        matches!(self.pieces.first(), Some(Piece::Variable(_)))
    }

    /// Returns the variables, in order.
    pub fn variables(&self) -> impl Iterator<Item = &Variable> {
        self.pieces.iter().filter_map(|piece| match piece {
            Piece::Variable(variable) => Some(variable),
            Piece::Text(_) => None,
        })
    }

    /// Returns the word with the values of its variables.
    pub fn fill(&self, value: impl Fn(&Variable) -> String) -> String {
        let is_json = matches!(self.pieces.first(), Some(Piece::Text(text)) if text.starts_with('{'));
        let escape = |value: String| if is_json { in_json(&value) } else { in_option(&value) };
        let pieces = self.pieces.iter().map(|piece| match piece {
            Piece::Text(text) => text.clone(),
            Piece::Variable(variable) => escape(value(variable)),
        });
        pieces.collect()
    }
}

fn variable(inner: &str) -> Option<Variable> {
    let (kind, name) = inner.split_once(':').unwrap_or((inner, ""));
    let is_kind = !kind.is_empty() && kind.bytes().all(|byte| byte.is_ascii_lowercase());
    let is_name = name.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"._-".contains(&byte));
    let is_variable = is_kind && is_name && (!name.is_empty() || !inner.contains(':'));
    is_variable.then(|| Variable { kind: kind.to_owned(), name: name.to_owned() })
}

fn in_option(value: &str) -> String {
    value.replace(',', ",,")
}

fn in_json(value: &str) -> String {
    let quoted = serde_json::Value::from(value).to_string();
    quoted[1..quoted.len() - 1].to_owned()
}

#[cfg(test)]
mod tests {
    use super::Template;

    fn filled(word: &str) -> String {
        Template::parse(word).fill(|variable| format!("<{},\"{}\">", variable.kind, variable.name))
    }

    #[test]
    fn variables_are_filled_and_other_braces_stay() {
        assert_eq!(filled("path={disk:root},x=1"), "path=<disk,,\"root\">,x=1");
        assert_eq!(filled("unix:{qmp},{qmp}"), "unix:<qmp,,\"\">,<qmp,,\"\">");
        for word in ["", "plain", "{", "}", "{}", "{disk:}", "{Disk}", "{a b}", "{\"driver\": {\"x\": 1}}"] {
            assert_eq!(filled(word), word);
        }
    }

    #[test]
    fn what_goes_into_json_is_escaped_as_json() {
        assert_eq!(filled(r#"{"path": "{disk:a}"}"#), r#"{"path": "<disk,\"a\">"}"#);
    }
}
