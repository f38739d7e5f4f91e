//! The step in which libvirt moves a domain: its memory and definition, or the definition alone.

use std::path::Path;
use std::time::Duration;

use super::error::LibvirtError;
use super::virsh::TextFile;
use super::{Move, steps};
use crate::commands::CommandError;
use crate::exit::Exit;
use crate::output::{self, Format};

/// Time between two reports of the memory's progress.
const SAID_EVERY: Duration = Duration::from_secs(1);
/// The longest wait for libvirt to take an order to abort.
const ABORT_MAX: Duration = Duration::from_secs(10);

impl Move<'_> {
    /// Lets libvirt move the domain. Whether it has is seen afterwards: virsh may fail in spite of it.
    pub(super) async fn move_domain(&mut self, is_running: bool) -> Result<Option<Exit>, CommandError> {
        let uuid = self.domain.uuid.clone();
        let is_persistent = self.domain.here.is_persistent(&uuid).await?;
        let files = self.definitions(is_persistent).await?;
        let mut words = vec!["migrate", if is_running { "--live" } else { "--offline" }];
        if is_persistent {
            words.extend(["--persistent", "--undefinesource"]);
        }
        if is_running {
            words.push("--verbose");
        }
        let paths: Vec<_> = files.iter().map(|(option, file)| (*option, file.path())).collect();
        words.extend(paths.iter().flat_map(|(option, path)| [*option, path.as_str()]));
        words.extend(self.order.options.iter().map(String::as_str));
        words.extend(["--domain", &uuid, "--desturi", &self.domain.there.uri]);
        let mut virsh = self.domain.here.begin(&words)?;
        let mut is_aborted = false;
        let succeeded = loop {
            tokio::select! {
                ended = virsh.ended() => break ended.map_err(LibvirtError::NoVirsh)?,
                () = tokio::time::sleep(SAID_EVERY) => {
                    if let Some(percent) = virsh.percent().filter(|_| self.format == Format::Text) {
                        output::say_in_place(&format!("memory: {percent} %"));
                    }
                }
                _ = self.interrupt.recv() => {
                    if std::mem::replace(&mut is_aborted, true) {
                        output::say("libvirt goes on; see: virsh domjobinfo");
                        return Ok(Some(Exit::Interrupted));
                    }
                    output::say("cancelling; press Ctrl-C again to stop waiting");
                    let words = ["domjobabort", uuid.as_str()];
                    let aborted = tokio::time::timeout(ABORT_MAX, self.domain.here.ask(&words)).await;
                    if let Ok(Err(error)) = aborted {
                        output::say(&output::with_causes(&error));
                        // It has not begun yet: the next Ctrl-C tries again.
                        is_aborted = false;
                    }
                }
            }
        };
        output::say_in_place("");
        if succeeded {
            self.attached.clear();
            return Ok(None);
        }
        self.after_failure(is_running, is_aborted, virsh.errors()).await
    }

    /// Looks what became of a move of the domain that virsh has reported as failed.
    async fn after_failure(
        &mut self,
        was_running: bool,
        is_aborted: bool,
        said: String,
    ) -> Result<Option<Exit>, CommandError> {
        let domain = self.domain.name.clone();
        let seen = match self.domain.look(self.client).await {
            Ok(seen) => seen,
            Err(error) => {
                let reason = output::with_causes(&error);
                return Err(LibvirtError::Unseen { domain, reason, said }.into());
            }
        };
        if seen.has_left() {
            output::say(&format!(
                "libvirt reported: {said}; the domain is at {} nevertheless",
                self.domain.host
            ));
            self.attached.clear();
            return Ok(None);
        }
        if !seen.has_stayed(was_running) {
            output::say(&format!("libvirt reported: {said}"));
            return match steps::next(&seen, self.order.memory_first) {
                Err(obstacle) => Err(self.domain.obstacle(obstacle).into()),
                Ok(_) => {
                    let stands =
                        "It is shut off here now: start it, or give the same order again to move it as it is"
                            .to_owned();
                    Err(LibvirtError::NotMoved { domain, words: said, stands }.into())
                }
            };
        }
        self.detach().await;
        let not_moved = LibvirtError::NotMoved { domain, words: said, stands: self.standing(&seen).await };
        if is_aborted {
            output::say(&not_moved.to_string());
            return Ok(Some(Exit::Cancelled));
        }
        Err(not_moved.into())
    }

    /// Returns the options of virsh that change the definition, each with its file.
    async fn definitions(&self, is_persistent: bool) -> Result<Vec<(&'static str, TextFile)>, CommandError> {
        let Some(folder) = &self.order.sockets else { return Ok(Vec::new()) };
        let mut files = vec![("--xml", self.definition(&["--migratable"], folder).await?)];
        if is_persistent {
            files.push(("--persistent-xml", self.definition(&["--migratable", "--inactive"], folder).await?));
        }
        Ok(files)
    }

    async fn definition(&self, options: &[&str], folder: &Path) -> Result<TextFile, LibvirtError> {
        let words = [&["dumpxml", self.domain.uuid.as_str()], options].concat();
        let definition = self.domain.here.ask(&words).await?;
        TextFile::of(&self.domain.moved(&definition, folder)?).map_err(LibvirtError::NoVirsh)
    }
}
