//! The command line of `sterna store`.

use std::str::FromStr;

use clap::{Args, Subcommand};

use super::{ExportArguments, ImageFormat};

#[derive(Debug, Subcommand)]
pub(crate) enum StoreCommand {
    /// List the stores with their free space.
    #[command(visible_alias = "ls", after_help = "Example:\n  sterna store list --json")]
    List,
    /// List everything that lies in a store: images with whose they are, half-made targets, images that migrations left, and
    /// other files.
    #[command(after_help = SCAN_HELP)]
    Scan {
        /// Name of the store; by default all.
        name: Option<String>,
    },
    /// Make a volume of an image that lies in a store and belongs to nothing. Nothing is copied.
    #[command(after_help = IMPORT_HELP)]
    Import(ImportArguments),
    /// Delete a half-made target that nobody claims.
    #[command(after_help = DROP_HELP)]
    Drop {
        /// The file, as `store scan` prints it.
        file: StoreFileName,
    },
    /// Give up what a migration left on a device or an NBD server, so that it can take another volume.
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
    /// Name of the volume; by default that of the file, without its ending. The file is renamed after it.
    #[arg(long, value_name = "VOLUME")]
    pub(crate) name: Option<String>,
    /// Format of the file; by default what it begins with tells, once and for all.
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

What a file is:
  volume         the image of a volume; backing: what the image of one stands on
  target         filled by a migration under way
  replica        left by a migration; the volume's way home begins with it, if that comes back
  stale-replica  left by a migration; of no use to Sterna any more (sterna replica drop)
  half-made      a part of a disk, which no migration fills any more (sterna store drop)
  unclaimed      an image that belongs to nothing that is known here (sterna store import)
  unsettled      was being made or deleted when the daemon ended; its next start settles it
  other          no image

A half-made target is one beside which Sterna has left a mark (.IMAGE.partial), or whose name has .partial in it. That an image
is unclaimed says nothing of other hosts: a volume of its name may be in use there.";

const IMPORT_HELP: &str = "\
Examples:
  sterna store import fast/web1.img
  sterna store import fast/debian.raw --name web1

The file stays in its store and gets the volume's name. What was in it was yours: `volume remove` leaves it, unless you say
--delete-image. It is refused if it is a half-made target, belongs to a volume or a migration, was left by one, or is in use by
another program.

N.B. After the loss of a data folder look on the other hosts first: a volume that has moved there must not be served here, too.";

const DROP_HELP: &str = "\
Example:
  sterna store drop fast/web1.img

Nothing else is deleted: it is refused for whatever is whole, belongs to somebody, or is in use.";

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
