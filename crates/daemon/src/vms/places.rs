//! Words of a command with places in them: `path={disk:root},x=1`.
//!
//! A place is a word of small letters in braces, with or without a name behind a colon. Other braces are the command's
//! own: QEMU takes JSON. What goes into a place is escaped as the word around it needs it.

/// One word of a command, cut at its places.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Template {
    pieces: Vec<Piece>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Piece {
    Text(String),
    Place(Place),
}

/// A place.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Place {
    /// What kind of thing goes there, such as `disk`.
    pub(super) kind: String,
    /// Which of them; empty if there is one only.
    pub(super) name: String,
}

impl std::fmt::Display for Place {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.name.as_str() {
            "" => write!(formatter, "{{{}}}", self.kind),
            name => write!(formatter, "{{{}:{name}}}", self.kind),
        }
    }
}

impl Template {
    /// Cuts a word.
    pub(super) fn parse(word: &str) -> Self {
        let (mut pieces, mut text, mut rest) = (Vec::new(), String::new(), word);
        while let Some(start) = rest.find('{') {
            let (before, from) = rest.split_at(start);
            text.push_str(before);
            let inner = from[1..].split_once('}').and_then(|(inner, after)| Some((place(inner)?, after)));
            match inner {
                Some((place, after)) => {
                    pieces.push(Piece::Text(std::mem::take(&mut text)));
                    pieces.push(Piece::Place(place));
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

    /// The places, in order.
    pub(super) fn places(&self) -> impl Iterator<Item = &Place> {
        self.pieces.iter().filter_map(|piece| match piece {
            Piece::Place(place) => Some(place),
            Piece::Text(_) => None,
        })
    }

    /// The word with what `value` says in its places.
    pub(super) fn fill(&self, value: impl Fn(&Place) -> String) -> String {
        let is_json = matches!(self.pieces.first(), Some(Piece::Text(text)) if text.starts_with('{'));
        let escape = |value: String| if is_json { in_json(&value) } else { in_option(&value) };
        let pieces = self.pieces.iter().map(|piece| match piece {
            Piece::Text(text) => text.clone(),
            Piece::Place(place) => escape(value(place)),
        });
        pieces.collect()
    }
}

fn place(inner: &str) -> Option<Place> {
    let (kind, name) = inner.split_once(':').unwrap_or((inner, ""));
    let is_kind = !kind.is_empty() && kind.bytes().all(|byte| byte.is_ascii_lowercase());
    let is_name = name.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"._-".contains(&byte));
    let is_place = is_kind && is_name && (!name.is_empty() || !inner.contains(':'));
    is_place.then(|| Place { kind: kind.to_owned(), name: name.to_owned() })
}

/// A value within one of QEMU's lists of options, where commas separate.
fn in_option(value: &str) -> String {
    value.replace(',', ",,")
}

/// A value within a JSON string.
fn in_json(value: &str) -> String {
    let quoted = serde_json::Value::from(value).to_string();
    quoted[1..quoted.len() - 1].to_owned()
}

#[cfg(test)]
mod tests {
    use super::Template;

    fn filled(word: &str) -> String {
        Template::parse(word).fill(|place| format!("<{},\"{}\">", place.kind, place.name))
    }

    #[test]
    fn places_are_filled_and_other_braces_stay() {
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
