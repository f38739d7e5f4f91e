//! Hides volumes' identities in preflight checks: a host that has the volume, or had it, recognises it; others learn nothing.

use std::collections::BTreeMap;

use migration::VolumeId;
use migration::journal::State;
use ring::digest::{Context, SHA256};

/// The context of the digest.
const PURPOSE: &[u8] = b"sterna look ahead";

/// Returns a volume's identity for a preflight check, from which the real identity cannot be computed.
pub(crate) fn veiled(volume: VolumeId) -> VolumeId {
    let mut context = Context::new(&SHA256);
    context.update(PURPOSE);
    context.update(&volume.0);
    let mut veiled = [0; 16];
    veiled.iter_mut().zip(context.finish().as_ref()).for_each(|(byte, digest)| *byte = *digest);
    VolumeId(veiled)
}

/// Returns the volume behind a hidden identity if this host knows it, or else the identity itself.
pub(crate) fn unveiled(state: &State, asked: VolumeId) -> VolumeId {
    let mut known = state.volumes.keys().chain(state.moved.keys()).chain(state.branches.keys());
    known.find(|known| veiled(**known) == asked).copied().unwrap_or(asked)
}

/// Returns pairs of the asked identities and the volumes of this host; leaves out unknown ones.
pub(crate) fn all_unveiled(state: &State, asked: &[VolumeId]) -> impl Iterator<Item = (VolumeId, VolumeId)> {
    let moving = state.migrations.values().flat_map(|known| &known.volumes).map(|moving| moving.volume);
    let known = state.volumes.keys().chain(state.moved.keys()).copied().chain(moving);
    let known = known.chain(state.restored_volumes().map(|(volume, _)| volume));
    let by_name: BTreeMap<VolumeId, VolumeId> = known.map(|volume| (veiled(volume), volume)).collect();
    asked.iter().filter_map(move |name| Some((*name, *by_name.get(name)?)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_veiled_identity_is_known_again_by_who_knows_the_volume() {
        let [volume, other] = [VolumeId([1; 16]), VolumeId([2; 16])];
        let mut state = State::default();
        assert_ne!(veiled(volume), volume);
        assert_eq!(unveiled(&state, veiled(volume)), veiled(volume));
        state.branches.insert(volume, Vec::new());
        assert_eq!(unveiled(&state, veiled(volume)), volume);
        assert_eq!(unveiled(&state, veiled(other)), veiled(other));
    }
}
