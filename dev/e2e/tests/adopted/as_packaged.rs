//! Tests of the adoption of another user's QEMU with the configuration of the package: the sockets of its disks become that
//! user's, and no other socket does.

use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};

use anyhow::ensure;
use api::{Migration, MigrationState, Vm};
use e2e::Host;

use crate::hostile_user::{USER, VM, play};

#[test]
fn a_qemu_of_another_user_is_adopted_moved_released_and_adopted_again() {
    play(|scene, user| {
        // Its user can open a released image there.
        std::fs::set_permissions(scene.path("b"), std::fs::Permissions::from_mode(0o711))?;
        user.adopt(scene)?.success()?;
        ensure!(socket(scene)? == (USER, 0o600), "{:?}", socket(scene)?);
        let moved: Migration = scene.ask(&["migrate", VM, "--to", "b"])?;
        ensure!(moved.state == MigrationState::Moved, "{moved:?}");
        // QEMU connects again to the next daemon.
        scene.kill()?;
        scene.start()?;
        ensure!(socket(scene)? == (USER, 0o600), "{:?}", socket(scene)?);
        let released: Vm = scene.ask(&["vm", "release", VM])?;
        let [image] = released.images.as_slice() else { anyhow::bail!("{released:?}") };
        ensure!(image.contains("/b/") && std::fs::metadata(image)?.uid() == USER, "{image}");

        user.adopt(scene)?.success()?;
        ensure!(socket(scene)? == (USER, 0o600), "{:?}", socket(scene)?);
        scene.sterna(["vm", "release", VM])?.success()?;
        // A later volume of this name is none of that user's.
        scene.sterna(["volume", "create", VM, "--store", "a", "--size", "1MiB"])?.success()?;
        ensure!(socket(scene)?.0 == 0, "{:?}", socket(scene)?);
        Ok(())
    });
}

#[test]
fn a_refused_adoption_names_the_folder_that_the_user_cannot_pass() {
    play(|scene, user| {
        // A daemon leaves the mode of a folder that it has not made.
        scene.stop()?;
        scene.start()?;
        std::fs::set_permissions(scene.path("run"), std::fs::Permissions::from_mode(0o700))?;
        let refused = user.adopt(scene)?;
        let advice = format!("chmod o+x {}", scene.path("run").display());
        ensure!(refused.code != 0 && refused.stderr.contains(&advice), "{refused:?}");
        ensure!(refused.stderr.contains(&format!("the user {USER}")), "{refused:?}");
        scene.sterna(["volume", "create", VM, "--store", "a", "--size", "1MiB"])?.success()?;
        ensure!(socket(scene)?.0 == 0, "{:?}", socket(scene)?);
        Ok(())
    });
}

/// Returns the owner and the mode of the volume's socket.
fn socket(scene: &Host) -> anyhow::Result<(u32, u32)> {
    let found = std::fs::metadata(scene.path("run/volumes").join(format!("{VM}.sock")))?;
    Ok((found.uid(), found.mode() & 0o777))
}
