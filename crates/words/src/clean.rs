//! Makes one visible line of a foreign text.

use std::fmt;

/// Largest length of a foreign message, in characters. The rest is cut.
pub const MESSAGE_CHARS_MAX: usize = 4096;

/// Marks the place where a text was cut.
const CUT: char = '…';

/// A text that was cleaned by [`clean`].
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Cleaned(String);

impl Cleaned {
    /// Returns the cleaned text.
    pub fn of(text: &str) -> Self {
        Self(clean(text))
    }

    /// Returns the text as a string.
    pub fn into_string(self) -> String {
        self.0
    }
}

impl fmt::Display for Cleaned {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// Returns the text as one line of visible characters, at most [`MESSAGE_CHARS_MAX`] of them.
///
/// Control characters, ends of lines, overrides of the writing direction and invisible characters become escapes. Other short
/// texts are unchanged, so cleaning twice equals cleaning once.
pub fn clean(text: &str) -> String {
    cut(text, MESSAGE_CHARS_MAX)
}

/// Returns each of the texts cleaned.
pub fn clean_all(texts: Vec<String>) -> Vec<String> {
    texts.into_iter().map(|text| clean(&text)).collect()
}

/// Returns the last lines of a text as one line, separated by ` | `: at most `lines_max` of them, each cleaned.
pub fn clean_lines(text: &str, lines_max: usize) -> String {
    let lines: Vec<String> =
        text.lines().map(str::trim_end).filter(|line| !line.is_empty()).map(clean).collect();
    clean(&lines[lines.len().saturating_sub(lines_max)..].join(" | "))
}

/// Returns the whole text for a terminal, with its lines and tabs, but without control characters.
pub fn printable(text: &str) -> String {
    let mut shown = String::with_capacity(text.len());
    for character in text.chars() {
        match character {
            '\n' | '\t' => shown.push(character),
            _ => push(&mut shown, character),
        }
    }
    shown
}

fn cut(text: &str, chars_max: usize) -> String {
    let length: usize = text.chars().map(width).sum();
    let mut shown = String::with_capacity(text.len().min(chars_max * 4));
    if length <= chars_max {
        text.chars().for_each(|character| push(&mut shown, character));
        return shown;
    }
    // The mark is one character.
    let mut left = chars_max - 1;
    for character in text.chars() {
        match left.checked_sub(width(character)) {
            Some(less) => left = less,
            None => break,
        }
        push(&mut shown, character);
    }
    shown.push(CUT);
    shown
}

/// Returns the number of characters that are shown for this one.
fn width(character: char) -> usize {
    if is_unseen(character) { character.escape_default().count() } else { 1 }
}

fn push(shown: &mut String, character: char) {
    if is_unseen(character) {
        shown.extend(character.escape_default());
    } else {
        shown.push(character);
    }
}

/// Returns whether a character is invisible or changes the display.
fn is_unseen(character: char) -> bool {
    character.is_control()
        || matches!(character,
            // Soft hyphen, marks and overrides of direction, characters without width, separators of lines.
            '\u{ad}' | '\u{61c}' | '\u{115f}' | '\u{1160}' | '\u{180e}' | '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}'
            | '\u{2060}'..='\u{206f}' | '\u{3164}' | '\u{fe00}'..='\u{fe0f}' | '\u{feff}' | '\u{ffa0}' | '\u{fff0}'..='\u{fffb}'
            | '\u{e0000}'..='\u{e0fff}')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_text_cannot_begin_a_line_move_the_cursor_or_turn_around() {
        assert_eq!(
            clean("a\nb\r\u{1b}[2J\u{9b}1mä\u{202e}x\u{7}"),
            "a\\nb\\r\\u{1b}[2J\\u{9b}1mä\\u{202e}x\\u{7}"
        );
        assert_eq!(clean("\u{2028}\u{feff}\u{e0041}"), "\\u{2028}\\u{feff}\\u{e0041}");
        assert_eq!(printable("a\n\tb\u{1b}]0;x\u{7}"), "a\n\tb\\u{1b}]0;x\\u{7}");
    }

    #[test]
    fn what_is_visible_stays_as_it_is() {
        for text in ["", "web1", "\"größe\" – 1 µs … 日本", &"x".repeat(MESSAGE_CHARS_MAX)] {
            assert_eq!(clean(text), text);
            assert_eq!(printable(text), text);
        }
    }

    #[test]
    fn a_long_text_is_cut_and_cleaning_twice_is_cleaning_once() {
        for text in ["x".repeat(5000), "\u{1b}".repeat(5000), "日".repeat(5000), "\n".repeat(409) + "yyyy"] {
            let once = clean(&text);
            assert!(once.chars().count() <= MESSAGE_CHARS_MAX, "{}", once.chars().count());
            assert_eq!(clean(&once), once);
        }
        assert!(clean(&"x".repeat(5000)).ends_with("x…"));
    }

    #[test]
    fn the_last_lines_become_one() {
        assert_eq!(clean_lines("a\n\nb\r\nc\u{1b}[0m\n", 2), "b | c\\u{1b}[0m");
    }
}
