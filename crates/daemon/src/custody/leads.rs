//! The meaning of names in an image's header, decided from the text alone, as QEMU reads it.
//!
//! ```text
//!   base.img · /srv/base.img · file:base.img · json:{…"filename":…}      a file
//!   nbd://… · nbd+unix://…?socket=… · nbd:unix:…:exportname=…            an export, maybe of a volume
//!   https://…                                                            another machine
//!   all else                                                             unknown
//! ```
//! A name can have several readings: a relative name is in the folder of the image's name or of the
//! file itself. All readings count.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};

use serde_json::Value;

/// Depth of names within names that is followed.
const DEPTH_MAX: usize = 8;
/// Protocols whose files are on no host of Sterna.
const AWAY: [&str; 7] = ["http", "https", "ftp", "ftps", "rbd", "iscsi", "iser"];
/// Drivers of QEMU without a file below.
const NOTHING: [&str; 2] = ["null-co", "null-aio"];

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Lead {
    /// A file or device on this host.
    File(PathBuf),
    /// An export: its URI as written, and the names of this host's volumes that it may belong to.
    Export { uri: String, volumes: Vec<String> },
    /// A file that is not on this host.
    Away,
    /// An unknown place: this part of the name cannot be parsed.
    Unknown(String),
}

/// Returns all readings of a name. `folders` are the image's possible folders.
pub(super) fn leads(name: &[u8], folders: &[PathBuf]) -> Vec<Lead> {
    let mut found = Vec::new();
    add_name(&mut found, name, folders, DEPTH_MAX);
    found
}

fn add_name(found: &mut Vec<Lead>, name: &[u8], folders: &[PathBuf], depth: usize) {
    let unknown = || Lead::Unknown(String::from_utf8_lossy(name).into_owned());
    let Some(depth) = depth.checked_sub(1) else { return found.push(unknown()) };
    let first = name.iter().position(|byte| b":/".contains(byte));
    let protocol = first.filter(|at| name.get(*at) == Some(&b':')).and_then(|at| name.get(..at));
    let Some(protocol) = protocol else { return add_path(found, name, folders) };
    let (Ok(text), Ok(protocol)) = (std::str::from_utf8(name), std::str::from_utf8(protocol)) else {
        return found.push(unknown());
    };
    let rest = text.get(protocol.len() + 1..).unwrap_or_default();
    match protocol {
        "file" | "host_device" | "host_cdrom" => add_path(found, rest.as_bytes(), folders),
        "json" => match serde_json::from_str(rest) {
            Ok(options) => add_options(found, text, &options, folders, depth),
            Err(_) => found.push(unknown()),
        },
        _ if protocol == "nbd" || protocol.starts_with("nbd+") || protocol.starts_with("nbds") => {
            found.push(export(text, rest));
        }
        _ if AWAY.contains(&protocol) => found.push(Lead::Away),
        _ => found.push(unknown()),
    }
}

fn add_path(found: &mut Vec<Lead>, path: &[u8], folders: &[PathBuf]) {
    let path = Path::new(OsStr::from_bytes(path));
    match path.is_absolute() {
        true => found.push(Lead::File(path.to_owned())),
        false => found.extend(folders.iter().map(|folder| Lead::File(folder.join(path)))),
    }
}

/// Parses an export's URI (`nbd://…`), or the older form (`nbd:unix:PATH:exportname=NAME`).
fn export(uri: &str, rest: &str) -> Lead {
    let (place, query) = rest.split_once(['?', '#']).unwrap_or((rest, ""));
    let mut volumes = Vec::new();
    match place.strip_prefix("//") {
        Some(place) => {
            let name = place.split_once('/').map_or("", |(_, name)| name);
            volumes.push(decoded(name));
            let sockets = query.split(['&', ';']).filter_map(|part| part.strip_prefix("socket="));
            volumes.extend(sockets.filter_map(|socket| of_socket(decoded(socket))));
        }
        None => {
            let (place, name) = place.split_once(":exportname=").unwrap_or((place, ""));
            volumes.push(name.to_owned());
            volumes.extend(place.strip_prefix("unix:").and_then(of_socket));
        }
    }
    volumes.retain(|name| !name.is_empty());
    Lead::Export { uri: uri.to_owned(), volumes }
}

/// Returns the volume that a socket of Sterna is named after.
pub(super) fn of_socket(socket: impl AsRef<Path>) -> Option<String> {
    Some(socket.as_ref().file_stem()?.to_str()?.to_owned())
}

/// Decodes the percent signs of a part of a URI.
fn decoded(text: &str) -> String {
    let mut bytes = Vec::new();
    let mut rest = text.as_bytes();
    while let Some((first, after)) = rest.split_first() {
        let code = after.get(..2).and_then(|digits| std::str::from_utf8(digits).ok());
        let code = code.and_then(|digits| u8::from_str_radix(digits, 16).ok()).filter(|_| *first == b'%');
        bytes.push(code.unwrap_or(*first));
        rest = if code.is_some() { after.get(2..).unwrap_or_default() } else { after };
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

/// Adds the options of the block layer, nested or with dots in their keys. Each text that can be a file's name counts as a file.
fn add_options(found: &mut Vec<Lead>, whole: &str, options: &Value, folders: &[PathBuf], depth: usize) {
    let before = found.len();
    let mut texts = Vec::new();
    collect(options, "", &mut texts);
    let mut volumes = Vec::new();
    for (key, text) in &texts {
        match *key {
            "filename" | "image" | "x-image" => add_name(found, text.as_bytes(), folders, depth),
            "export" => volumes.push((*text).to_owned()),
            "path" => volumes.extend(of_socket(text)),
            _ => {}
        }
        if text.contains('/') && *key != "filename" {
            add_path(found, text.as_bytes(), folders);
        }
    }
    let is_driver = |name: &str| texts.iter().any(|(key, text)| *key == "driver" && *text == name);
    if is_driver("nbd") {
        found.push(Lead::Export { uri: whole.to_owned(), volumes });
    }
    if AWAY.iter().any(|protocol| is_driver(protocol)) || NOTHING.iter().any(|driver| is_driver(driver)) {
        found.push(Lead::Away);
    }
    if found.len() == before {
        found.push(Lead::Unknown(whole.to_owned()));
    }
}

/// Collects all texts of a value, each with the last part of its key. The parser has limited the depth.
fn collect<'a>(value: &'a Value, key: &'a str, texts: &mut Vec<(&'a str, &'a str)>) {
    match value {
        Value::String(text) => texts.push((key, text)),
        Value::Array(values) => values.iter().for_each(|value| collect(value, key, texts)),
        Value::Object(values) => {
            for (key, value) in values {
                collect(value, key.rsplit('.').next().unwrap_or(key), texts);
            }
        }
        _ => {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(name: &str, expected: &[Lead]) {
        let folders = ["/s/link".into(), "/s/real".into()];
        assert_eq!(leads(name.as_bytes(), &folders), expected, "{name}");
    }

    fn file(path: &str) -> Lead {
        Lead::File(path.into())
    }

    fn export(uri: &str, volumes: &[&str]) -> Lead {
        Lead::Export { uri: uri.to_owned(), volumes: volumes.iter().map(|name| (*name).to_owned()).collect() }
    }

    #[test]
    fn files_are_found_however_they_are_named() {
        check("/s/base.img", &[file("/s/base.img")]);
        check("file:/s/base.img", &[file("/s/base.img")]);
        check("host_device:/dev/vg/base", &[file("/dev/vg/base")]);
        check("../a:b/base", &[file("/s/link/../a:b/base"), file("/s/real/../a:b/base")]);
        check("file:base", &[file("/s/link/base"), file("/s/real/base")]);
        check(r#"json:{"driver":"qcow2","file":{"driver":"file","filename":"/s/base"}}"#, &[file("/s/base")]);
        check(r#"json:{"file.filename":"/s/base","driver":"raw"}"#, &[file("/s/base")]);
        check(r#"json:{"file":{"filename":"json:{\"filename\":\"/s/base\"}"}}"#, &[file("/s/base")]);
        check(
            r#"json:{"driver":"blkverify","raw":"/s/a","test":{"x":["/s/b"]}}"#,
            &[file("/s/a"), file("/s/b")],
        );
    }

    #[test]
    fn exports_are_those_of_volumes_by_name_or_socket() {
        let uri = "nbd+unix:///web1?socket=/run/sterna/volumes/web1.sock";
        check(uri, &[export(uri, &["web1", "web1"])]);
        let uri = "nbd+unix:///?socket=%2Frun%2Fweb%31.sock";
        check(uri, &[export(uri, &["web1"])]);
        check("nbd://127.0.0.1:10809/web1", &[export("nbd://127.0.0.1:10809/web1", &["web1"])]);
        let old = "nbd:unix:/run/web1.sock:exportname=other";
        check(old, &[export(old, &["other", "web1"])]);
        let json = r#"json:{"driver":"nbd","export":"web1","server":{"type":"unix","path":"/run/v/x.sock"}}"#;
        check(json, &[file("/run/v/x.sock"), export(json, &["web1", "x"])]);
    }

    #[test]
    fn what_is_not_understood_is_unknown() {
        for name in ["ssh://here/base", "blkdebug:a:b", "json:{'filename':'/s/base'}", "json:{}", "a:b"] {
            check(name, &[Lead::Unknown(name.to_owned())]);
        }
        check("https://example.org/base", &[Lead::Away]);
        let mut nested = r#"{"filename":"/s/base"}"#.to_owned();
        for _ in 0..DEPTH_MAX {
            nested = serde_json::json!({ "filename": format!("json:{nested}") }).to_string();
        }
        assert!(matches!(&leads(format!("json:{nested}").as_bytes(), &[])[..], [Lead::Unknown(_)]));
    }
}
