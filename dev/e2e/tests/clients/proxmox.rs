//! Tests of the storage for Proxmox of `contrib/proxmox`, as two nodes would call it.

use std::path::Path;

use anyhow::Context as _;
use e2e::throw_away_root::repository;
use e2e::{Host, play_pair, program};
use testbed::program::Program;

/// Debian's Perl, which `scripts/install-packages` installs.
const PERL: &str = "/usr/bin/perl";
/// A program of the whole of Perl, which a minimal system lacks.
const PROVE: &str = "/usr/bin/prove";

/// Returns the address of a daemon, and the folder of its volumes' sockets.
fn place(host: &Host) -> anyhow::Result<(String, String)> {
    let sockets = host.path("run/volumes");
    let sockets = sockets.to_str().context("a folder that is not UTF-8")?;
    Ok((host.address()?.to_string(), sockets.to_owned()))
}

#[test]
fn the_storage_does_on_two_nodes_what_proxmox_asks_of_it() {
    if !Path::new(PROVE).exists() {
        return omission::machine_lacks("perl");
    }
    play_pair(|pair| {
        let ((alpha, alpha_run), (beta, beta_run)) = (place(&pair.alpha)?, place(&pair.beta)?);
        let sterna = program::sterna()?;
        let folder = sterna.parent().and_then(Path::to_str).context("a folder that is not UTF-8")?;
        let path = format!("{folder}:{}", std::env::var("PATH")?);
        let test = Program::of_package(PERL, "perl").arg(repository().join("contrib/proxmox/t/plugin.t"));
        let test = test.env("PATH", path).env("ALPHA", alpha).env("ALPHA_RUN", alpha_run);
        println!("{}", test.env("BETA", beta).env("BETA_RUN", beta_run).succeed()?);
        Ok(())
    });
}
