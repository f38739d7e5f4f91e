//! The record of a migration's hooks in a file: their context, the running process, and the result.

use std::collections::BTreeSet;
use std::io;
use std::path::{Path, PathBuf};

use migration::MigrationId;
use migration::hooks::{HookCourse, HookEnd, HookProcess, HookRecord};
use serde::{Deserialize, Serialize};

use super::HookContext;
use crate::files::whole_file;

/// The longest file: the names of all volumes of one migration, and two messages.
const BYTES_MAX: u64 = 1 << 20;
const VERSION: u32 = 1;

#[derive(Serialize, Deserialize)]
struct Form {
    version: u32,
    migration: u64,
    context: HookContext,
    subject: BTreeSet<String>,
    before: CourseForm,
    after: CourseForm,
}

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
enum CourseForm {
    NotBegun,
    Begun { id: i32, started: u64, boot: String },
    Ended { fault: Option<String> },
}

/// Makes a record durable.
pub(super) fn write(
    folder: &Path,
    migration: MigrationId,
    context: HookContext,
    record: HookRecord,
) -> io::Result<()> {
    let HookRecord { subject, before, after } = record;
    let (before, after) = (before.into(), after.into());
    let form = Form { version: VERSION, migration: migration.0, context, subject, before, after };
    whole_file::replace(&path(folder, migration), &serde_json::to_vec(&form)?)
}

pub(super) fn forget(folder: &Path, migration: MigrationId) -> io::Result<()> {
    match std::fs::remove_file(path(folder, migration)) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        removed => removed,
    }
}

/// Reads all records of a folder. Unreadable ones are logged and left.
pub(super) fn read_all(folder: &Path) -> Vec<(MigrationId, HookContext, HookRecord)> {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    let files =
        entries.map(|entry| entry.path()).filter(|path| path.extension().is_some_and(|is| is == "json"));
    files
        .filter_map(|path| match read(&path) {
            Ok(form) => {
                let record =
                    HookRecord { subject: form.subject, before: form.before.into(), after: form.after.into() };
                Some((MigrationId(form.migration), form.context, record))
            }
            Err(error) => {
                tracing::warn!(path = %path.display(), %error, "cannot read the record of hooks: check whether a hook still \
                    runs, then delete the file");
                None
            }
        })
        .collect()
}

fn read(path: &Path) -> io::Result<Form> {
    let bytes = whole_file::read(path, BYTES_MAX)?.ok_or(io::ErrorKind::NotFound)?;
    let form: Form = serde_json::from_slice(&bytes)?;
    if form.version == VERSION { Ok(form) } else { Err(io::ErrorKind::Unsupported.into()) }
}

fn path(folder: &Path, migration: MigrationId) -> PathBuf {
    folder.join(format!("{migration}.json"))
}

impl From<HookCourse> for CourseForm {
    fn from(course: HookCourse) -> Self {
        match course {
            HookCourse::NotBegun => Self::NotBegun,
            HookCourse::Begun(HookProcess { id, started, boot }) => {
                Self::Begun { id, started, boot: format!("{boot:032x}") }
            }
            HookCourse::Ended(HookEnd::Good) => Self::Ended { fault: None },
            HookCourse::Ended(HookEnd::Bad(fault)) => Self::Ended { fault: Some(fault) },
        }
    }
}

impl From<CourseForm> for HookCourse {
    fn from(form: CourseForm) -> Self {
        match form {
            CourseForm::NotBegun => Self::NotBegun,
            CourseForm::Begun { id, started, boot } => {
                // A boot that does not exist, so that the process is not found.
                Self::Begun(HookProcess { id, started, boot: u128::from_str_radix(&boot, 16).unwrap_or(0) })
            }
            CourseForm::Ended { fault: None } => Self::Ended(HookEnd::Good),
            CourseForm::Ended { fault: Some(fault) } => Self::Ended(HookEnd::Bad(fault)),
        }
    }
}
