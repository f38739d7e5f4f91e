//! The repository's files as text, and findings in them.

use std::fmt;
use std::path::{Path, PathBuf};

use crate::lexer::{self, Layers};

/// Folders without own files.
const SKIPPED: [&str; 3] = [".git", "target", "node_modules"];

/// All text files of the repository.
pub(crate) struct Tree {
    files: Vec<File>,
}

pub(crate) struct File {
    /// Path from the root of the repository, with slashes.
    pub(crate) path: String,
    /// The content, with replacements for bytes that are not UTF-8.
    pub(crate) text: String,
}

/// A Rust file with separated code and comments.
pub(crate) struct RustFile {
    pub(crate) path: String,
    pub(crate) text: String,
    pub(crate) layers: Layers,
}

#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Finding {
    path: String,
    /// Line counted from one; `None` for the whole file.
    line: Option<usize>,
    /// The violation, and what to do instead.
    message: String,
}

impl Tree {
    /// Reads the repository that this crate is in.
    pub(crate) fn read() -> Self {
        let root = root();
        let mut files = Vec::new();
        read_folder(&root, &root, &mut files);
        files.sort_by(|a, b| a.path.cmp(&b.path));
        Self { files }
    }

    /// Returns a tree of given files, for the tests of rules.
    pub(crate) fn of(files: &[(&str, &str)]) -> Self {
        let file = |(path, text): &(&str, &str)| File { path: (*path).to_owned(), text: (*text).to_owned() };
        Self { files: files.iter().map(file).collect() }
    }

    pub(crate) fn files(&self) -> impl Iterator<Item = &File> {
        self.files.iter()
    }

    pub(crate) fn file(&self, path: &str) -> Option<&File> {
        self.files.iter().find(|file| file.path == path)
    }

    /// Returns whether a file, or a folder with files, has this path.
    pub(crate) fn has(&self, path: &str) -> bool {
        let path = path.trim_end_matches('/');
        let is_below = |file: &File| file.path.strip_prefix(path).is_some_and(|rest| rest.starts_with('/'));
        self.files.iter().any(|file| file.path == path || is_below(file))
    }

    pub(crate) fn rust(&self) -> impl Iterator<Item = RustFile> {
        self.files
            .iter()
            .filter(|file| file.path.ends_with(".rs"))
            .map(|file| RustFile::new(&file.path, &file.text))
    }
}

impl RustFile {
    pub(crate) fn new(path: &str, text: &str) -> Self {
        Self { path: path.to_owned(), text: text.to_owned(), layers: lexer::split(text) }
    }

    /// Returns the file's name without its folder.
    pub(crate) fn name(&self) -> &str {
        self.path.rsplit('/').next().unwrap()
    }
}

impl Finding {
    pub(crate) fn in_file(path: &str, message: impl Into<String>) -> Self {
        Self { path: path.to_owned(), line: None, message: message.into() }
    }

    /// Returns a finding in a line. `index` counts lines from zero.
    pub(crate) fn in_line(path: &str, index: usize, message: impl Into<String>) -> Self {
        Self { path: path.to_owned(), line: Some(index + 1), message: message.into() }
    }
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.line {
            Some(line) => write!(f, "{}:{line}: {}", self.path, self.message),
            None => write!(f, "{}: {}", self.path, self.message),
        }
    }
}

/// Returns a file's package and the path in it. Packages of the product are below `crates/`, the others below `dev/`.
/// `fuzz` is a workspace of its own.
pub(crate) fn in_package(path: &str) -> Option<(&str, &str)> {
    let below = path.strip_prefix("crates/").or_else(|| path.strip_prefix("dev/"))?;
    below.split_once('/').filter(|(name, _)| *name != "fuzz")
}

pub(crate) fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().nth(2).unwrap().to_owned()
}

fn read_folder(root: &Path, folder: &Path, files: &mut Vec<File>) {
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_string_lossy().into_owned();
        if SKIPPED.contains(&name.as_str()) || path.is_symlink() {
            continue;
        }
        if path.is_dir() {
            read_folder(root, &path, files);
        } else if let Ok(bytes) = std::fs::read(&path) {
            // Other tests make and delete files meanwhile; a file that has disappeared is ignored.
            let path = path.strip_prefix(root).unwrap().to_string_lossy().into_owned();
            files.push(File { path, text: String::from_utf8_lossy(&bytes).into_owned() });
        }
    }
}
