//! `--host ssh://…`, by an ssh that leads to a socket of this machine, as a forwarding does.

use std::os::unix::fs::PermissionsExt as _;
use std::path::PathBuf;

use serde_json::Value;

use crate::scene::{Outcome, Scene, code, outcome_of};

/// It notes what it was asked for, makes the socket that leads there, and stays until it is ended.
const FORWARDS: &str = r#"#!/bin/sh
echo "$@" >>"$NOTES"
while [ "$1" != -L ]; do shift; done
ln -s "${2#*:}" "${2%%:*}"
exec sleep 600
"#;
/// It is through, and leads to nobody.
const LEADS_NOWHERE: &str = r#"#!/bin/sh
while [ "$1" != -L ]; do shift; done
exec python3 -c '
import socket, sys
s = socket.socket(socket.AF_UNIX); s.bind(sys.argv[1]); s.listen()
while True: s.accept()[0].close()
' "${2%%:*}"
"#;
/// It does not get there.
const FAILS: &str =
    "#!/bin/sh\necho 'ssh: connect to host nowhere port 22: No route to host' >&2\nexit 255\n";

fn folder_of_ssh(scene: &Scene, script: &str) -> PathBuf {
    let folder = scene.path("bin");
    std::fs::create_dir_all(&folder).unwrap();
    std::fs::write(folder.join("ssh"), script).unwrap();
    std::fs::set_permissions(folder.join("ssh"), std::fs::Permissions::from_mode(0o755)).unwrap();
    folder
}

fn run(scene: &Scene, script: &str, host: &str, arguments: &[&str]) -> Outcome {
    let folder = folder_of_ssh(scene, script);
    let path = format!("{}:{}", folder.display(), std::env::var("PATH").unwrap());
    let mut command = scene.command(arguments);
    command.env("PATH", path).env("STERNA_HOST", host).env("NOTES", scene.path("notes"));
    command.env("XDG_RUNTIME_DIR", scene.path("run"));
    outcome_of(command)
}

#[test]
fn a_daemon_of_another_machine_is_asked_by_one_ssh_a_command() {
    let scene = Scene::started();
    scene.create_volume();
    let socket = scene.path("run/api.sock");
    let host = format!("ssh://root@rack3-b:2222{}", socket.display());
    let listed = run(&scene, FORWARDS, &host, &["volume", "list", "--json"]);
    assert_eq!(listed.code, 0, "{listed:?}");
    let volumes: Value = serde_json::from_str(&listed.stdout).unwrap();
    assert_eq!(volumes[0]["name"], "v");
    // More than one request, and a wait for news.
    let moved = run(&scene, FORWARDS, &host, &["migrate", "v", "--to", "b"]);
    assert_eq!(moved.code, 0, "{moved:?}");
    let refused = run(&scene, FORWARDS, &host, &["volume", "show", "w", "--json"]);
    assert_eq!(refused.code, 3, "{refused:?}");
    let notes = std::fs::read_to_string(scene.path("notes")).unwrap();
    let asked: Vec<_> = notes.lines().collect();
    assert_eq!(asked.len(), 3, "{notes}");
    let ending = format!(":{} -- root@rack3-b", socket.display());
    assert!(asked.iter().all(|line| line.contains("-p 2222") && line.ends_with(&ending)), "{notes}");
    // Nothing is left of them.
    let left = std::fs::read_dir(scene.path("run")).unwrap().map(|entry| entry.unwrap().file_name());
    assert!(left.into_iter().all(|name| !name.to_string_lossy().starts_with("sterna-ssh")));
}

#[test]
fn what_ssh_cannot_do_is_told_with_what_to_try() {
    let scene = Scene::started();
    let failed = run(&scene, FAILS, "ssh://nowhere", &["volume", "list"]);
    assert_eq!(failed.code, 7, "{failed:?}");
    assert!(failed.stderr.contains("No route to host"), "{failed:?}");
    assert!(failed.stderr.contains("try: ssh nowhere true"), "{failed:?}");
    let nobody = run(&scene, LEADS_NOWHERE, "ssh://there", &["volume", "list", "--json"]);
    let error: Value = serde_json::from_str(&nobody.stdout).unwrap();
    assert_eq!((nobody.code, code(&error)), (7, "daemon_unreachable"), "{error}");
    let message = error["error"]["message"].as_str().unwrap();
    assert!(message.starts_with("no daemon answers at /run/sterna/sterna.sock on there"), "{message}");
    // Nobody is asked for what takes no daemon, and no option is smuggled in.
    assert_eq!(run(&scene, FAILS, "ssh://nowhere", &["config", "check", "--help"]).code, 0);
    assert_eq!(run(&scene, FAILS, "ssh://-oProxyCommand=x", &["volume", "list"]).code, 2);
}
