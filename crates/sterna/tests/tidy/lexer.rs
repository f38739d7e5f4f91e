//! Separates code from comments and strings.

/// Copies of a file with the same lines and columns. In each copy the other layers are blank.
pub(crate) struct Layers {
    /// The code, without comments and without the content of strings and characters.
    pub(crate) code: String,
    pub(crate) comments: String,
}

pub(crate) fn split(text: &str) -> Layers {
    let characters: Vec<char> = text.chars().collect();
    let mut layers = Layers { code: String::new(), comments: String::new() };
    let mut at = 0;
    while at < characters.len() {
        let (kind, length) = next(&characters, at);
        for &character in &characters[at..at + length] {
            let blank = if character == '\n' { '\n' } else { ' ' };
            layers.code.push(if kind == Kind::Code { character } else { blank });
            layers.comments.push(if kind == Kind::Comment { character } else { blank });
        }
        at += length;
    }
    layers
}

/// Returns the words of a line of code: identifiers, keywords and numbers.
pub(crate) fn words(code: &str) -> impl Iterator<Item = &str> {
    code.split(|character: char| !character.is_alphanumeric() && character != '_')
        .filter(|word| !word.is_empty())
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Code,
    Comment,
    Literal,
}

/// Returns the kind and the length of the token at `at`.
fn next(text: &[char], at: usize) -> (Kind, usize) {
    let rest = &text[at..];
    let begins_word = at == 0 || !(text[at - 1].is_alphanumeric() || text[at - 1] == '_');
    match rest {
        ['/', '/', ..] => (Kind::Comment, rest.iter().take_while(|&&c| c != '\n').count()),
        ['/', '*', ..] => (Kind::Comment, block_comment(rest)),
        ['"', ..] => (Kind::Literal, quoted(rest, 1)),
        ['b' | 'c', '"', ..] if begins_word => (Kind::Literal, quoted(rest, 2)),
        ['r', '"' | '#', ..] if begins_word => raw_string(rest, 1),
        ['b' | 'c', 'r', '"' | '#', ..] if begins_word => raw_string(rest, 2),
        ['\'', '\\', ..] => (Kind::Literal, 3 + rest.iter().skip(3).take_while(|&&c| c != '\'').count() + 1),
        // A lifetime has no quote after its first character.
        ['\'', _, '\'', ..] => (Kind::Literal, 3),
        _ => (Kind::Code, 1),
    }
}

fn block_comment(rest: &[char]) -> usize {
    let (mut depth, mut at) = (0_usize, 0);
    while at < rest.len() {
        match rest[at..] {
            ['/', '*', ..] => (depth, at) = (depth + 1, at + 2),
            ['*', '/', ..] => (depth, at) = (depth - 1, at + 2),
            _ => at += 1,
        }
        if depth == 0 {
            break;
        }
    }
    at
}

fn quoted(rest: &[char], opening: usize) -> usize {
    let mut at = opening;
    while at < rest.len() {
        match rest[at] {
            '\\' => at += 2,
            '"' => return at + 1,
            _ => at += 1,
        }
    }
    rest.len()
}

/// Returns a raw string, or a raw identifier, which is code.
fn raw_string(rest: &[char], opening: usize) -> (Kind, usize) {
    let hashes = rest[opening..].iter().take_while(|&&c| c == '#').count();
    if rest.get(opening + hashes) != Some(&'"') {
        return (Kind::Code, 1);
    }
    let mut at = opening + hashes + 1;
    while at < rest.len() {
        let closes =
            rest[at] == '"' && rest[at + 1..].iter().take(hashes).filter(|&&c| c == '#').count() == hashes;
        at += 1;
        if closes {
            return (Kind::Literal, at + hashes);
        }
    }
    (Kind::Literal, rest.len())
}

#[cfg(test)]
mod tests {
    use super::{split, words};

    fn check(text: &str, code: &[&str]) {
        assert_eq!(words(&split(text).code).collect::<Vec<_>>(), code, "{text}");
    }

    #[test]
    fn comments_and_literals_are_no_code() {
        check("one // two\nthree", &["one", "three"]);
        check("one /* two /* three */ four */ five", &["one", "five"]);
        check(r#"one "two \" three" four"#, &["one", "four"]);
        check(r##"one r#"two " three"# four br"five" six"##, &["one", "four", "six"]);
        check(
            r"one '\'' two 'x' three &'a four '\u{1f}' five",
            &["one", "two", "three", "a", "four", "five"],
        );
        check("r#type bar\"two\"", &["r", "type", "bar"]);
        check("an \"unclosed // string", &["an"]);
    }

    #[test]
    fn layers_keep_lines_and_columns() {
        let layers = split("a /* b\nc */ d\n\"e\nf\" g");
        assert_eq!(layers.code, "a     \n     d\n  \n   g");
        assert_eq!(layers.comments, "  /* b\nc */  \n  \n    ");
    }
}
