//! Tests of valid and of refused configurations.

use std::path::PathBuf;

use super::{Config, ConfigError, EngineSetting, Overrides, SocketAccess, StoreConfig};
use crate::config::folders::Folders;

fn folders() -> Folders {
    Folders { config_file: None, data_dir: Some("/data".into()), runtime_dir: "/run/s".into() }
}

fn load(text: &str) -> Result<Config, ConfigError> {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("sterna.toml");
    std::fs::write(&path, text).unwrap();
    Config::load(&Overrides { config_file: Some(path), ..Overrides::default() }, &folders())
}

/// Returns the message of the error without the folder of the file.
fn refusal(text: &str) -> String {
    let message = load(text).unwrap_err().to_string();
    match message.find("sterna.toml") {
        Some(start) => message[start..].to_owned(),
        None => message,
    }
}

#[test]
fn without_a_file_there_is_one_store_under_the_data_folder() {
    let config = Config::load(&Overrides::default(), &folders()).unwrap();
    let store = StoreConfig::Folder { path: "/data/images".into(), format: None };
    assert_eq!(config.stores.into_iter().collect::<Vec<_>>(), [("default".into(), store)]);
    assert_eq!(config.api_socket, SocketAccess::default());
    assert_eq!(config.api.to_string(), "unix:/run/s/sterna.sock");
    assert_eq!(config.volume_sockets_dir, PathBuf::from("/run/s/volumes"));
    assert_eq!(config.engine, EngineSetting::Auto);
}

#[test]
fn command_line_wins_over_the_file_and_the_file_over_the_defaults() {
    let text = "data_dir = '/from-file'\napi = 'unix:/from-file/api'\nengine = 'threads'\n\
                [stores.a]\npath = '/a'\n[limits]\nmirror_wait_max_ms = 250\n";
    let config = load(text).unwrap();
    assert_eq!(config.data_dir, PathBuf::from("/from-file"));
    assert_eq!(config.volume_sockets_dir, PathBuf::from("/from-file/volumes"));
    assert_eq!(config.engine, EngineSetting::Threads);
    assert_eq!(config.stores.keys().collect::<Vec<_>>(), ["a"]);
    assert_eq!(config.limits.mirror_wait_max.as_millis(), 250);
    assert_eq!(config.limits.stop_wait_max.as_millis(), 10_000);

    let overrides = Overrides {
        config_file: None,
        data_dir: Some("/given".into()),
        api: Some("unix:/given/api".parse().unwrap()),
    };
    let config = Config::load(&overrides, &folders()).unwrap();
    assert_eq!(config.data_dir, PathBuf::from("/given"));
    assert_eq!(config.api.to_string(), "unix:/given/api");
}

#[test]
fn unknown_key_is_named_with_its_line_and_the_nearest_valid_one() {
    let cases = [
        ("engin = 'auto'", "sterna.toml: line 1: unknown key \"engin\"; did you mean \"engine\"?"),
        ("\n[store.a]\npath = '/a'", "sterna.toml: line 2: unknown key \"store\"; did you mean \"stores\"?"),
        (
            "[stores.a]\npth = '/a'",
            "sterna.toml: line 2: unknown key \"stores.a.pth\"; did you mean \"path\"?",
        ),
        (
            "[limits]\nmirror_wait_ms = 1",
            "sterna.toml: line 2: unknown key \"limits.mirror_wait_ms\"; did you mean \"mirror_wait_max_ms\"?",
        ),
        (
            "[stores.a]\npath='/a'\ncolour = 1",
            "sterna.toml: line 3: unknown key \"stores.a.colour\"; valid here: delay, device, fault, format, nbd, \
             path",
        ),
        (
            "zzz = 1\n[stores.a]\npth = '/a'",
            "sterna.toml: line 1: unknown key \"zzz\"; valid here: api, api_socket, api_tls, data_dir, engine, hooks, hosts, limits, \
             machines, nbd, notify, standby, stores, volume_sockets, web",
        ),
    ];
    for (text, expected) in cases {
        assert_eq!(refusal(text), expected, "{text}");
    }
}

#[test]
fn values_that_cannot_be_meant_are_refused_by_key() {
    let cases = [
        ("data_dir = 'data'", "data_dir = \"data\" must be an absolute path"),
        ("[stores.a]\npath = 'a'", "stores.a.path = \"a\" must be an absolute path"),
        ("[limits]\nmirror_wait_max_ms = 5", "limits.mirror_wait_max_ms = 5 must be between 10 and 30000"),
        ("[limits]\nchunks_in_flight = 65", "limits.chunks_in_flight = 65 must be between 1 and 64"),
        ("[limits]\nchunk_bytes = 4096", "limits.chunk_bytes = 4096 must be between 65536 and 4194304"),
        ("[limits]\nmigrations_per_host = 0", "limits.migrations_per_host = 0 must be between 1 and 1000"),
        ("[limits]\nmigrations_per_store = 1001", "limits.migrations_per_store = 1001 must be between"),
        ("[hooks]\nbefore = 'run'", "hooks.before = \"run\" must be an absolute path"),
        ("[hooks]\ntimeout_s = 0", "hooks.timeout_s = 0 must be between 1 and 300"),
        (
            "[hooks]\nafter = '/nonexistent'",
            "hooks.after = \"/nonexistent\": it cannot be examined: No such file",
        ),
        ("[hooks]\nbefore = '/'", "hooks.before = \"/\": it is no file"),
        (
            "[hooks]\nbefore = '/etc/passwd'",
            "hooks.before = \"/etc/passwd\": it is not executable; chmod +x it",
        ),
        ("[standby]\nverify = 'yearly'", "write off, daily, weekly, monthly, or a time"),
        ("[stores.'../a']\npath = '/a'", "\"../a\" cannot be the name of a store: only letters"),
        (
            "[stores.a]\npath = '/a'\n[stores.b]\npath = '/a'",
            "stores.b: it is at the same place as the store \"a\": /a",
        ),
        ("[stores.a]\ndevice = 'sda'", "stores.a.device = \"sda\" must be an absolute path"),
        ("[stores.a]\npath = '/a'\ndevice = '/dev/a'", "stores.a: it has both path and device"),
        ("[stores.a]\nnbd = 'nbd://a/b'\ndevice = '/dev/a'", "stores.a: it has both device and nbd"),
        ("[stores.a]\ndevice = '/dev/a'\nformat = 'qcow2'", "stores.a: format is for folders"),
        ("[stores.a]\npath = '/a'\nformat = 'vmdk'", "unknown variant `vmdk`"),
        ("[stores.a]\nnbd = 'http://a/b'", "stores.a: \"http://a/b\" is no address of an NBD export"),
        ("[stores.a]\npath = '/a'\n[stores.a.delay]", "stores.a: delay is empty; set one of read_us"),
        ("[stores.a]\npath = '/a'\ndelay.read_us = 10000001", "stores.a: delay.read_us = 10000001 must be"),
        (
            "[stores.a]\npath = '/a'\ndelay.bytes_per_second = 0",
            "delay.bytes_per_second = 0 would let nothing",
        ),
        ("[stores.a]\npath = '/a'\ndelay.write_us = -1", "invalid value: integer `-1`"),
        ("[stores.a]\npath = '/a'\n[stores.a.fault]", "stores.a: fault.operations is empty; name what fails"),
        ("[stores.a]\npath = '/a'\nfault.operations = ['trim']", "unknown variant `trim`"),
        (
            "[stores.a]\npath = '/a'\nfault = { operations = ['read'], error = 'no-space' }",
            "stores.a: fault.error = \"no-space\" is for writes",
        ),
        (
            "[stores.a]\npath = '/a'\nfault = { operations = ['read'], probability = 1.5 }",
            "stores.a: fault.probability = 1.5 must be above 0 and at most 1",
        ),
        (
            "[stores.a]\npath = '/a'\nfault = { operations = ['read'], offset = 4096 }",
            "stores.a: fault.offset and fault.length belong together",
        ),
        (
            "[stores.a]\npath = '/a'\nfault = { operations = ['read'], offset = 1, length = 4096 }",
            "stores.a: fault.offset and fault.length belong together, and are multiples of 4096",
        ),
        ("[nbd]\nconnections_max = 0", "nbd.connections_max = 0 must be between 1 and 1024"),
        (
            "[nbd]\ntls = { certificate = 'c', key = '/k' }",
            "nbd.tls.certificate = \"c\" must be an absolute path",
        ),
        ("[nbd.tls]\ncertificate = '/c'", "missing field `key`"),
        ("[nbd.tls]\ncertificate = '/c'\nkey = '/k'\nca = '/a'", "line 4: unknown key \"nbd.tls.ca\""),
        ("[api_socket]\nmode = '0777'", "api_socket: \"0777\" is no mode of a socket"),
        ("[volume_sockets]\nowner = 'no-such-user'", "volume_sockets: there is no user \"no-such-user\""),
        ("api = 'tcp:1'", "the API cannot be served there"),
        ("engine = 'fast'", "unknown variant `fast`"),
        ("[stores.a]", "stores.a: it has no place; set one of: path"),
        ("stores = 3", "invalid type"),
        ("data_dir = ", "line 1"),
    ];
    for (text, expected) in cases {
        let message = refusal(text);
        assert!(message.contains(expected), "{text}: {message}");
    }
}

#[test]
fn every_fault_is_found_at_once_and_in_the_order_of_the_file() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("sterna.toml");
    std::fs::write(
        &path,
        "engin = 1\n[stores.a]\npath = 'a'\n[stores.b]\n[limits]\nmigrations_per_host = 0\n",
    )
    .unwrap();
    let overrides = Overrides { config_file: Some(path), ..Overrides::default() };
    let faults = Config::load_whole(&overrides, &folders()).unwrap_err();
    let found: Vec<_> = faults.iter().map(ToString::to_string).collect();
    let keys = ["\"engin\"", "stores.a.path", "stores.b:", "limits.migrations_per_host"];
    assert_eq!(found.len(), keys.len(), "{found:?}");
    assert!(found.iter().zip(keys).all(|(found, key)| found.contains(key)), "{found:?}");
    assert!(faults.into_first().to_string().contains("\"engin\""));
}

#[test]
fn explicit_file_must_exist_and_be_small() {
    let missing = Overrides { config_file: Some("/nonexistent/sterna.toml".into()), ..Overrides::default() };
    assert!(matches!(Config::load(&missing, &folders()), Err(ConfigError::Read { .. })));
    let text = "# ".to_owned() + &"x".repeat(1 << 20);
    assert!(matches!(load(&text), Err(ConfigError::TooLarge { .. })));
}

#[test]
fn stores_that_are_slowed_down_or_fail_say_so() {
    let delay = "read_us = 500\nwrite_us = 20000\nbytes_per_second = 1000\noperations_per_second = 7";
    let fault = "operations = ['write', 'flush']\nprobability = 0.25\nafter = 3\ncount = 2\noffset = 4096\nlength = 8192";
    let text = format!(
        "[stores.a]\npath = '/a'\n[stores.a.delay]\n{delay}\n[stores.a.fault]\n{fault}\n[stores.b]\npath = '/b'\n"
    );
    let config = load(&text).unwrap();
    let said: Vec<_> =
        config.impairments.iter().map(|(name, said)| (name.as_str(), said.to_string())).collect();
    let expected = "SLOWED on purpose: 500µs more for each read, 20ms more for each write, at most 1000 bytes a second, \
                    at most 7 requests a second; FAULTY on purpose: writes, flushes fail with a probability of 0.25 in the \
                    8192 bytes from 4096 on after the first 3, 2 times";
    assert_eq!(said, [("a", expected.to_owned())]);
    let full =
        load("[stores.a]\npath = '/a'\nfault = { operations = ['write'], error = 'no-space' }").unwrap();
    assert_eq!(full.impairments["a"].to_string(), "FAULTY on purpose: writes find no space");
}

#[test]
fn without_a_home_the_data_folder_must_be_given() {
    let homeless = Folders { data_dir: None, ..folders() };
    assert!(matches!(Config::load(&Overrides::default(), &homeless), Err(ConfigError::NoDataDir)));
}

#[test]
fn example_of_the_documentation_is_valid_and_has_the_defaults() {
    let page = include_str!("../../../../docs/configuration.md");
    let example = page.split("```toml").nth(1).unwrap().split("```").next().unwrap();
    let documented = load(example).unwrap();
    let default = load("").unwrap();
    assert_eq!((documented.engine, documented.limits), (default.engine, default.limits));
    assert_eq!(documented.hooks, default.hooks);
    assert_eq!(documented.stores.len(), 4);
    assert_eq!(documented.api_socket, default.api_socket);
    assert_eq!(documented.volume_sockets, default.volume_sockets);
}

#[test]
fn the_file_that_packages_install_is_valid_and_so_is_each_key_that_it_explains() {
    // The package's users and groups do not exist on every host that runs tests.
    let shipped = include_str!("../../../../packaging/sterna.toml");
    let shipped = shipped.replace("root:sterna", "root:root").replace("sterna-qemu", "root");
    let installed = load(&shipped).unwrap();
    let default = load("").unwrap();
    let without_access = Config { api_socket: default.api_socket.clone(), ..installed };
    assert_eq!(format!("{without_access:?}"), format!("{default:?}"));

    // A key is "#key = …", and a table "#[table]"; explanations have a space there.
    let is_key = |line: &&str| line.starts_with('#') && !line.starts_with("# ") && line.len() > 1;
    let keys: String = shipped
        .lines()
        .map(|line| line.strip_prefix('#').filter(|_| is_key(&line)).unwrap_or(line).to_owned() + "\n")
        .collect();
    // Neither the hooks nor the host's files exist.
    let programs = ["/etc/sterna/before", "/etc/sterna/after", "/etc/sterna/tell"];
    let keys = programs.iter().fold(keys, |keys, program| keys.replace(program, "/bin/true"));
    let explained = load(&keys).unwrap();
    assert_eq!((explained.limits, explained.engine), (default.limits, default.engine));
    assert_eq!((explained.hosts, explained.data_dir), (default.hosts, "/var/lib/sterna".into()));
    assert_eq!(explained.stores.len(), 3);

    for key in super::keys::all() {
        let name = key.rsplit('.').next().unwrap();
        let is_it =
            |line: &str| line.starts_with(&format!("{name} = ")) || line.ends_with(&format!("{name}]"));
        assert!(keys.lines().any(is_it), "{key} is not explained");
    }
}
