//! Finds unknown keys of the configuration, and the known keys that were probably meant.

use toml::de::{DeTable, DeValue};

/// The least similarity of a suggested key, 0 to 1 (Jaro-Winkler). It finds `path` and `stores` for `pth` and `store`; for
/// `colour` no suggestion is better than a bad one.
const SIMILARITY_MIN: f64 = 0.7;

/// A key that the configuration does not have.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnknownKey {
    /// The key with the tables around it, separated by dots.
    pub key: String,
    /// The line in the file, counted from 1.
    pub line: usize,
    /// The most similar known key, if there is one.
    pub nearest: Option<&'static str>,
    /// All keys that are valid there.
    pub valid: &'static [&'static str],
}

impl std::fmt::Display for UnknownKey {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "line {}: unknown key \"{}\"; ", self.line, self.key)?;
        match self.nearest {
            Some(nearest) => write!(f, "did you mean \"{nearest}\"?"),
            None => write!(f, "valid here: {}", self.valid.join(", ")),
        }
    }
}

enum Table {
    /// With these keys, some of which are tables themselves.
    Keys(&'static [&'static str], &'static [(&'static str, Table)]),
    /// A table of this kind for each name that the user chooses.
    Named(&'static Table),
}

const TLS: Table = Table::Keys(&["certificate", "client_ca", "key", "required"], &[]);
const SOCKET: Table = Table::Keys(&["mode", "owner"], &[]);

const ROOT: Table = Table::Keys(
    &[
        "api",
        "api_socket",
        "api_tls",
        "data_dir",
        "engine",
        "hooks",
        "hosts",
        "limits",
        "machines",
        "nbd",
        "notify",
        "standby",
        "stores",
        "volume_sockets",
        "web",
    ],
    &[
        ("api_socket", SOCKET),
        ("api_tls", Table::Keys(&["listen"], &[])),
        ("hooks", Table::Keys(&["after", "before", "timeout_s"], &[])),
        ("hosts", Table::Keys(&["links", "listen", "machines", "shared_folders"], &[])),
        (
            "limits",
            Table::Keys(
                &[
                    "arrival_away_max_s",
                    "arrival_silent_max_s",
                    "chunk_bytes",
                    "chunks_in_flight",
                    "impact_percent",
                    "kept_images_per_volume",
                    "kept_percent_of_store",
                    "migrations_per_host",
                    "migrations_per_store",
                    "mirror_wait_max_ms",
                    "peer_migrations",
                    "peer_space_bytes",
                    "peer_volumes",
                    "stop_wait_max_ms",
                ],
                &[],
            ),
        ),
        ("machines", Table::Keys(&["allow", "folders", "suspended", "user", "users"], &[])),
        ("nbd", Table::Keys(&["connections_max", "tls"], &[("tls", TLS)])),
        ("notify", Table::Keys(&["program", "secret_file", "warnings", "webhook"], &[])),
        ("standby", Table::Keys(&["if_silent", "verify"], &[])),
        (
            "stores",
            Table::Named(&Table::Keys(
                &["delay", "device", "fault", "format", "nbd", "path"],
                &[
                    (
                        "delay",
                        Table::Keys(
                            &["bytes_per_second", "flush_us", "operations_per_second", "read_us", "write_us"],
                            &[],
                        ),
                    ),
                    (
                        "fault",
                        Table::Keys(
                            &["after", "count", "error", "length", "offset", "operations", "probability"],
                            &[],
                        ),
                    ),
                ],
            )),
        ),
        ("volume_sockets", SOCKET),
        ("web", Table::Keys(&["listen"], &[])),
    ],
);

/// Returns the unknown keys of `table`, which was parsed from `text`, in the order of the text.
pub(super) fn unknown(text: &str, table: &DeTable<'_>) -> Vec<UnknownKey> {
    let mut unknown = Vec::new();
    walk(text, &ROOT, "", table, &mut unknown);
    unknown.sort_by_key(|key| key.line);
    unknown
}

fn walk(text: &str, schema: &Table, prefix: &str, table: &DeTable<'_>, unknown: &mut Vec<UnknownKey>) {
    for (key, value) in table {
        let name: &str = key.get_ref();
        let path = format!("{prefix}{name}");
        let inner = match schema {
            Table::Named(inner) => Some(*inner),
            Table::Keys(valid, tables) if valid.contains(&name) => {
                tables.iter().find(|(table, _)| *table == name).map(|(_, table)| table)
            }
            Table::Keys(valid, _) => {
                let line = 1 + text[..key.span().start.min(text.len())].matches('\n').count();
                unknown.push(UnknownKey { key: path, line, nearest: nearest(name, valid), valid });
                continue;
            }
        };
        // A value in place of a table is left to the decoder, which says what it expected.
        if let (Some(inner), DeValue::Table(table)) = (inner, value.get_ref()) {
            walk(text, inner, &format!("{path}."), table, unknown);
        }
    }
}

fn nearest(name: &str, valid: &'static [&'static str]) -> Option<&'static str> {
    let similarity = |key: &str| strsim::jaro_winkler(name, key);
    let best = valid.iter().max_by(|a, b| similarity(a).total_cmp(&similarity(b)))?;
    (similarity(best) >= SIMILARITY_MIN).then_some(*best)
}

/// Returns every valid key that is not a table, with the tables around it; leaves out names that the user chooses.
#[cfg(test)]
pub(super) fn all() -> Vec<String> {
    fn walk(table: &Table, prefix: &str, found: &mut Vec<String>) {
        match table {
            Table::Named(inner) => walk(inner, prefix, found),
            Table::Keys(keys, tables) => {
                let is_value = |key: &&&str| !tables.iter().any(|(table, _)| table == *key);
                found.extend(keys.iter().filter(is_value).map(|key| format!("{prefix}{key}")));
                for (name, table) in *tables {
                    walk(table, &format!("{prefix}{name}."), found);
                }
            }
        }
    }
    let mut found = Vec::new();
    walk(&ROOT, "", &mut found);
    found
}
