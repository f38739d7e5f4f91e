//! Tests the walk, held files, and the rights of other users, with folders of another user beside those of root.

use std::ffi::OsStr;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _, chown, symlink};

use rustix::fs::CWD;

use super::*;

const USER: u32 = 24_005;

struct Folders {
    top: tempfile::TempDir,
}

impl Folders {
    /// `None`: files cannot be given to another user here.
    fn new() -> Option<Self> {
        if !rustix::process::geteuid().is_root() {
            omission::machine_lacks("root, to give files away");
            return None;
        }
        let top = tempfile::tempdir().unwrap();
        std::fs::create_dir(top.path().join("user")).unwrap();
        std::fs::write(top.path().join("secret"), b"root's").unwrap();
        std::fs::write(top.path().join("user/disk"), b"user's").unwrap();
        std::fs::set_permissions(top.path(), std::fs::Permissions::from_mode(0o711)).unwrap();
        std::fs::set_permissions(top.path().join("secret"), std::fs::Permissions::from_mode(0o600)).unwrap();
        for name in ["user", "user/disk"] {
            chown(top.path().join(name), Some(USER), Some(USER)).unwrap();
        }
        Some(Self { top })
    }

    fn path(&self, name: &str) -> PathBuf {
        self.top.path().join(name)
    }
}

#[test]
fn a_link_is_followed_only_in_a_folder_that_nobody_else_writes_to() {
    let Some(folders) = Folders::new() else { return };
    symlink("secret", folders.path("link")).unwrap();
    let found = find(&folders.path("link")).unwrap();
    assert_eq!((found.path(), found.reach()), (folders.path("secret").as_path(), Reach::Ours));
    assert_eq!(find_entry(&folders.path("link")).unwrap().kind(), FileType::Symlink);
    let of_user = find(&folders.path("user/disk")).unwrap();
    assert_eq!(of_user.reach(), Reach::Others);
    symlink(folders.path("secret"), folders.path("user/link")).unwrap();
    symlink(folders.top.path(), folders.path("user/folder")).unwrap();
    // Including a link that root has made there, and one in our folder that was given away.
    chown(folders.path("link"), None, None).unwrap();
    std::os::unix::fs::lchown(folders.path("link"), Some(USER), None).unwrap();
    for name in ["user/link", "user/folder/secret", "user/folder/../link", "link"] {
        let refused = find(&folders.path(name)).unwrap_err().to_string();
        assert!(refused.contains("is a link in a folder"), "{name}: {refused}");
    }
    // A folder that a group or all may write to counts as others'; with the sticky bit our entries stay ours.
    symlink("secret", folders.path("other")).unwrap();
    for (mode, reach) in
        [(0o755, Reach::Ours), (0o775, Reach::Others), (0o757, Reach::Others), (0o1777, Reach::Ours)]
    {
        std::fs::set_permissions(folders.top.path(), std::fs::Permissions::from_mode(mode)).unwrap();
        assert_eq!(find(&folders.path("secret")).unwrap().reach(), reach, "{mode:o}");
        assert_eq!(find(&folders.path("other")).is_ok(), reach == Reach::Ours, "{mode:o}");
    }
}

#[test]
fn parents_are_the_folders_that_were_passed() {
    let folder = tempfile::tempdir().unwrap();
    let top = folder.path().canonicalize().unwrap();
    std::fs::create_dir_all(top.join("a/b")).unwrap();
    std::fs::write(top.join("a/file"), b"x").unwrap();
    symlink("a/b", top.join("link")).unwrap();
    symlink(top.join("link/../b"), top.join("again")).unwrap();
    for name in ["a/b/../file", "link/../file", "./a//file", "again/../file"] {
        assert_eq!(find(&top.join(name)).unwrap().path(), top.join("a/file"), "{name}");
    }
    assert_eq!(find(Path::new("/../..")).unwrap().path(), Path::new("/"));
    symlink("loop", top.join("loop")).unwrap();
    assert_eq!(find(&top.join("loop")).unwrap_err().raw_os_error(), Some(40));
    assert_eq!(find(&top.join("none")).unwrap_err().kind(), io::ErrorKind::NotFound);
    for name in ["a/file/x", "a/file/../file"] {
        assert_eq!(find(&top.join(name)).unwrap_err().kind(), io::ErrorKind::NotADirectory);
    }
}

#[test]
fn what_is_held_stays_the_same_file_whatever_takes_its_name() {
    let Some(folders) = Folders::new() else { return };
    let disk = folders.path("user/disk");
    let held = find(&disk).unwrap();
    held.require_in_place().unwrap();
    std::fs::rename(&disk, folders.path("user/away")).unwrap();
    for exchange in ["nothing", "link", "hard link", "folder", "pipe", "file"] {
        match exchange {
            "link" => symlink(folders.path("secret"), &disk).unwrap(),
            "hard link" => std::fs::hard_link(folders.path("secret"), &disk).unwrap(),
            "folder" => std::fs::create_dir(&disk).unwrap(),
            "pipe" => rustix::fs::mknodat(CWD, &disk, FileType::Fifo, Mode::RUSR, 0).unwrap(),
            "file" => std::fs::write(&disk, b"other").unwrap(),
            _ => {}
        }
        assert!(held.require_in_place().is_err(), "{exchange}");
        held.give(USER + 1, USER + 1).unwrap();
        held.set_mode(0o640).unwrap();
        let secret = std::fs::metadata(folders.path("secret")).unwrap();
        assert_eq!((secret.uid(), secret.mode() & 0o777), (0, 0o600), "{exchange}");
        let away = std::fs::metadata(folders.path("user/away")).unwrap();
        assert_eq!((away.uid(), away.mode() & 0o777), (USER + 1, 0o640), "{exchange}");
        held.give(USER, USER).unwrap();
        if exchange == "folder" {
            std::fs::remove_dir(&disk).unwrap();
        } else if exchange != "nothing" {
            std::fs::remove_file(&disk).unwrap();
        }
    }
    let mut text = String::new();
    io::Read::read_to_string(&mut held.open(OFlags::RDONLY).unwrap(), &mut text).unwrap();
    assert_eq!(text, "user's");
}

#[test]
fn an_image_in_a_folder_of_others_is_a_regular_file_with_one_name() {
    let Some(folders) = Folders::new() else { return };
    let disk = folders.path("user/disk");
    find(&disk).unwrap().require_image().unwrap();
    std::fs::hard_link(&disk, folders.path("user/second")).unwrap();
    assert!(matches!(find(&disk).unwrap().require_image(), Err(Unfit::OtherNames { .. })));
    let pipe = folders.path("user/pipe");
    rustix::fs::mknodat(CWD, &pipe, FileType::Fifo, Mode::RUSR, 0).unwrap();
    assert!(matches!(find(&pipe).unwrap().require_image(), Err(Unfit::NotRegular { .. })));
    assert!(open_regular(&pipe).is_err() && open_regular(&folders.path("user")).is_err());
    assert!(find(&pipe).unwrap().require_socket().is_err());
    let socket = folders.path("user/socket");
    let _listener = std::os::unix::net::UnixListener::bind(&socket).unwrap();
    find(&socket).unwrap().require_socket().unwrap();
    // Where no other user writes, the administrator has made it.
    std::fs::hard_link(folders.path("secret"), folders.path("second")).unwrap();
    find(&folders.path("second")).unwrap().require_image().unwrap();
}

#[test]
fn a_user_may_read_what_the_system_would_let_it_read() {
    let Some(folders) = Folders::new() else { return };
    let user = User { user: USER, groups: vec![USER, 7] };
    let reads = |name: &str| find(&folders.path(name)).unwrap().lets_read(&user);
    assert!(reads("user/disk") && !reads("secret"));
    assert!(find(&folders.path("user/disk")).unwrap().lets_write(&user));
    let open = |name: &str, mode| {
        std::fs::set_permissions(folders.path(name), std::fs::Permissions::from_mode(mode)).unwrap();
    };
    open("secret", 0o644);
    assert!(reads("secret") && !find(&folders.path("secret")).unwrap().lets_write(&user));
    chown(folders.path("secret"), None, Some(7)).unwrap();
    // The class of its group decides, although all others may read it.
    open("secret", 0o604);
    assert!(!reads("secret"));
    open("secret", 0o640);
    assert!(reads("secret"));
    std::fs::set_permissions(folders.top.path(), std::fs::Permissions::from_mode(0o700)).unwrap();
    assert!(!reads("secret") && !reads("user/disk"));
    let root = User { user: 0, groups: vec![0] };
    assert!(find(&folders.path("secret")).unwrap().lets_write(&root));
}

#[test]
fn entries_are_changed_in_the_folder_that_is_held() {
    let Some(folders) = Folders::new() else { return };
    let (folder, name) = Folder::of(&folders.path("user/disk")).unwrap();
    assert_eq!((folder.path(), name.as_os_str()), (folders.path("user").as_path(), OsStr::new("disk")));
    assert_eq!(folder.reach(), Reach::Others);
    let disk = folder.find(&name).unwrap();
    // Another folder takes its name, with a file of the same name.
    std::fs::rename(folders.path("user"), folders.path("moved")).unwrap();
    symlink(folders.top.path(), folders.path("user")).unwrap();
    std::fs::write(folders.path("disk"), b"root's").unwrap();
    folder.create_new(OsStr::new("new"), 0o600).unwrap();
    assert!(folder.create_new(OsStr::new("new"), 0o600).is_err());
    folder.rename(&name, &folder, OsStr::new("new")).unwrap();
    assert!(folder.remove_held(OsStr::new("new"), &find(&folders.path("secret")).unwrap()).is_err());
    assert_eq!(folder.names().unwrap(), ["new"]);
    folder.remove_held(OsStr::new("new"), &disk).unwrap();
    folder.remove(OsStr::new("new")).unwrap();
    folder.sync().unwrap();
    assert!(folders.path("disk").exists() && std::fs::read_dir(folders.path("moved")).unwrap().count() == 0);
    for name in ["..", ".", "a/b", "a/", "/", ""] {
        assert!(folder.find(OsStr::new(name)).is_err(), "{name:?}");
        assert!(folder.remove(OsStr::new(name)).is_err(), "{name:?}");
    }
}
