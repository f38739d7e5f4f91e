//! The command line of `sterna store`.

use std::str::FromStr;

use clap::{Args, Subcommand};

use super::{ExportArguments, ImageFormat};

#[derive(Debug, Subcommand)]
pub(crate) enum StoreCommand {
    /// List the stores with their free space.
    #[command(visible_alias = "ls", after_help = "Example:\n  sterna store list --json")]
    List,
    /// List every file of a store: images with their volumes, half-made targets, kept images, and other files.
    #[command(after_help = SCAN_HELP)]
    Scan {
        /// Name of the store; by default all stores.
        name: Option<String>,
    },
    /// Make a volume of an unclaimed image in a store, without copying it.
    #[command(after_help = IMPORT_HELP)]
    Import(ImportArguments),
    /// Delete a half-made target without a migration.
    #[command(after_help = DROP_HELP)]
    Drop {
        /// The file, as `store scan` prints it.
        file: StoreFileName,
    },
    /// Give up an old copy on a device or an NBD server, so that it can take another volume.
    #[command(after_help = "Example:\n  sterna store release lv")]
    Release {
        /// Name of the store.
        name: String,
    },
}

#[derive(Debug, Args)]
pub(crate) struct ImportArguments {
    /// The file, as `store scan` prints it.
    pub(crate) file: StoreFileName,
    /// Name of the volume, after which the file is renamed; by default the name of the file, without its ending.
    #[arg(long, value_name = "VOLUME")]
    pub(crate) name: Option<String>,
    /// Format of the file; by default recognised by its first bytes, once.
    #[arg(long, value_enum)]
    pub(crate) format: Option<ImageFormat>,
    #[command(flatten)]
    pub(crate) export: ExportArguments,
}

/// A file in a store, `STORE/FILE`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct StoreFileName {
    /// Name of the store.
    pub(crate) store: String,
    /// Name of the file in it.
    pub(crate) file: String,
}

impl FromStr for StoreFileName {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text.split_once('/') {
            Some((store, file)) if !store.is_empty() && !file.is_empty() && !file.contains('/') => {
                Ok(Self { store: store.to_owned(), file: file.to_owned() })
            }
            _ => Err(
                "write STORE/FILE, as sterna store scan prints it; a file anywhere else is served by: sterna volume add NAME --image \
                 PATH",
            ),
        }
    }
}

const SCAN_HELP: &str = "\
Examples:
  sterna store scan
  sterna store scan fast --json | jq '.[0].files[] | select(.role == \"half-made\")'

Roles of files:
volume         the image of a volume; backing: a backing file of such an image
target         the target of a migration under way
replica        kept by a migration; a return of the volume can reuse it
stale-replica  kept by a migration; no return can reuse it (sterna replica drop)
half-made      an incomplete target of an ended migration (sterna store drop)
unclaimed      an image without a known owner (sterna store import)
unsettled      was being made or deleted when the daemon ended; its next start completes that
other          not an image

A half-made target has a mark of Sterna beside it (.IMAGE.partial), or .partial in its name. A file that has come to
the name of a marked one is not dropped. An unclaimed image may still belong to a volume of this name at another host.";

const IMPORT_HELP: &str = "\
Examples:
  sterna store import fast/web1.img
  sterna store import fast/debian.raw --name web1

The file stays in its store and gets the volume's name. `volume remove` leaves it, because you had it before, unless you give
--delete-image. The command is refused for a half-made target, for an image of a volume or a migration, and for an image that
another program uses.

N.B. After the loss of a data folder check the other hosts first: a volume that has moved there must not be served here as well.";

const DROP_HELP: &str = "\
Example:
  sterna store drop fast/web1.img

The command deletes nothing else: it is refused for complete images, for images with an owner, and for images in use.";

#[cfg(test)]
mod tests {
    use super::StoreFileName;

    #[test]
    fn a_file_of_a_store_is_not_a_path() {
        let name: StoreFileName = "fast/web 1.img".parse().unwrap();
        assert_eq!((name.store.as_str(), name.file.as_str()), ("fast", "web 1.img"));
        for text in ["", "fast", "/web1.img", "fast/", "/srv/fast/web1.img", "fast/sub/web1.img"] {
            text.parse::<StoreFileName>().unwrap_err();
        }
    }
}
