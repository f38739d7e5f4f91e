//! Migrations that a command names by what moves.

use api::{Client, ClientError, Migration};

/// Returns the identity of the migration that a user names: by its identity, or by its volume or VM. Of several migrations of one
/// volume it is the one under way, or else the latest. A text that names none is returned as it is, for the daemon to refuse.
pub(super) async fn identity(client: &Client, text: &str) -> Result<String, ClientError> {
    if is_identity(text) {
        return Ok(text.to_owned());
    }
    let migrations = client.migrations().await?;
    Ok(latest_of(text, &migrations).map_or_else(|| text.to_owned(), |found| found.id.clone()))
}

/// Returns whether a text is an identity, such as `m7`: then it names no volume.
fn is_identity(text: &str) -> bool {
    text.strip_prefix('m')
        .is_some_and(|number| !number.is_empty() && number.bytes().all(|byte| byte.is_ascii_digit()))
}

fn latest_of<'a>(name: &str, migrations: &'a [Migration]) -> Option<&'a Migration> {
    let is_named = |migration: &&Migration| {
        !name.is_empty()
            && (migration.name == name || migration.volume.split(", ").any(|volume| volume == name))
    };
    migrations
        .iter()
        .filter(is_named)
        .max_by_key(|migration| (migration.ended_unix_ms.is_none(), migration.started_unix_ms))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::top::tests::migration;

    #[test]
    fn of_several_migrations_of_a_name_the_one_under_way_is_meant_or_else_the_latest() {
        // Its identity, the order's name, its volumes, when it began and ended.
        let known = [
            ("m1", "web1", "web1-root, web1-data", 10, Some(20)),
            ("m2", "web1", "web1-root, web1-data", 30, Some(40)),
            ("m3", "db", "db", 15, None),
            ("m4", "db", "db", 25, Some(26)),
            // A former daemon has ended it.
            ("m5", "", "old", 1, Some(2)),
        ];
        let migrations: Vec<Migration> = known
            .into_iter()
            .map(|(id, name, volume, started_unix_ms, ended_unix_ms)| {
                let shown =
                    serde_json::from_value(migration(id, "moved", "ended")["migration"].clone()).unwrap();
                let (name, volume) = (name.to_owned(), volume.to_owned());
                Migration { name, volume, started_unix_ms, ended_unix_ms, ..shown }
            })
            .collect();
        let found = |name| latest_of(name, &migrations).map(|migration| migration.id.as_str());
        for (name, expected) in [
            ("web1", Some("m2")),
            ("web1-data", Some("m2")),
            ("db", Some("m3")),
            ("old", Some("m5")),
            ("web", None),
            ("", None),
        ] {
            assert_eq!(found(name), expected, "{name}");
        }
    }

    #[test]
    fn an_identity_is_no_name() {
        for (text, expected) in [("m7", true), ("m", false), ("m7a", false), ("web1", false), ("7", false)] {
            assert_eq!(is_identity(text), expected, "{text}");
        }
    }
}
