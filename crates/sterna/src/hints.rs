//! Leads from commands of other tools to those of this one.

use clap::error::{ContextKind, ContextValue, ErrorKind};

/// Nouns, the verbs that others use after them, and the commands here.
const ELSEWHERE: [(&str, &[&str], &str); 9] = [
    ("", &["status", "info"], "sterna health, or sterna top"),
    ("", &["list", "ls", "ps"], "sterna volume list, or sterna vm list"),
    ("", &["move", "mv"], "sterna migrate NAME --to HOST"),
    ("volume", &["delete", "destroy", "rmi"], "sterna volume remove NAME"),
    ("volume", &["migrate", "move", "mv"], "sterna migrate NAME --to STORE"),
    ("vm", &["delete", "undefine"], "sterna vm remove NAME"),
    ("vm", &["migrate", "move", "mv"], "sterna migrate NAME --to HOST"),
    ("vm", &["create", "define"], "sterna vm add NAME --definition FILE"),
    ("vm", &["shutdown", "destroy", "kill"], "sterna vm stop NAME, or with --now"),
];

/// Returns the command that was meant by one which does not exist.
pub(crate) fn hint(error: &clap::Error, words: &[String]) -> Option<&'static str> {
    if !matches!(error.kind(), ErrorKind::InvalidSubcommand | ErrorKind::UnknownArgument) {
        return None;
    }
    let verb = match error.get(ContextKind::InvalidSubcommand)? {
        ContextValue::String(verb) => verb,
        _ => return None,
    };
    let place = words.iter().position(|word| word == verb)?;
    let before = place.checked_sub(1).and_then(|place| words.get(place)).map_or("", String::as_str);
    let is_noun = ELSEWHERE.iter().any(|(noun, _, _)| !noun.is_empty() && *noun == before);
    let noun = if is_noun { before } else { "" };
    let found = ELSEWHERE.iter().find(|(known, verbs, _)| *known == noun && verbs.contains(&verb.as_str()));
    found.map(|(_, _, command)| *command)
}

#[cfg(test)]
mod tests {
    use clap::Parser as _;

    use super::hint;
    use crate::args::Arguments;

    #[test]
    fn a_command_of_other_tools_leads_to_the_one_that_is_meant() {
        let hint_for = |line: &str| {
            let words: Vec<String> = line.split(' ').map(str::to_owned).collect();
            hint(&Arguments::try_parse_from(&words).unwrap_err(), &words)
        };
        assert_eq!(hint_for("sterna volume delete a"), Some("sterna volume remove NAME"));
        assert_eq!(
            hint_for("sterna --host unix:/a vm migrate a --to b"),
            Some("sterna migrate NAME --to HOST")
        );
        assert_eq!(hint_for("sterna status"), Some("sterna health, or sterna top"));
        assert_eq!(hint_for("sterna frobnicate"), None);
        assert_eq!(hint_for("sterna volume create"), None);
    }
}
