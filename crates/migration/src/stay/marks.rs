//! The open files of marks: marks that they hold need not be written again.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;

use chronicle::Epoch;

use super::StayKey;
use crate::planted::{Bug, broken};

/// The most files of marks that are kept open.
const OPEN_MAX: usize = 64;

/// The open files of marks, each with its known content.
///
/// Known content stays true while a file is open. A file of marks is deleted only after its epoch has ended, and no epoch of a
/// residency begins twice. Each residency has files of its own.
#[derive(Debug)]
pub struct OpenMarks<F> {
    open: BTreeMap<(StayKey, Epoch), F>,
}

impl<F> Default for OpenMarks<F> {
    fn default() -> Self {
        Self { open: BTreeMap::new() }
    }
}

impl<F> OpenMarks<F> {
    /// Returns the file of an epoch, and opens it if necessary.
    ///
    /// # Errors
    /// Returns the errors of `open`.
    pub fn of<E>(
        &mut self,
        key: StayKey,
        epoch: Epoch,
        open: impl FnOnce() -> Result<F, E>,
    ) -> Result<&mut F, E> {
        let key = self.known_as((key, epoch));
        if !self.open.contains_key(&key) {
            if self.open.len() >= OPEN_MAX {
                self.open.pop_first();
            }
            // Epochs are marked in order, at most one ahead, so earlier ones are over.
            self.open.retain(|(of, known), _| of.volume != key.0.volume || known.next() >= epoch);
        }
        match self.open.entry(key) {
            Entry::Occupied(known) => Ok(known.into_mut()),
            Entry::Vacant(unknown) => Ok(unknown.insert(open()?)),
        }
    }

    /// Closes a file, and forgets its known content.
    pub fn close(&mut self, key: StayKey, epoch: Epoch) {
        self.open.remove(&self.known_as((key, epoch)));
    }

    /// The planted bug takes an open file of an earlier residency for this one's.
    fn known_as(&self, key: (StayKey, Epoch)) -> (StayKey, Epoch) {
        let of_another = |(of, _): &&(StayKey, Epoch)| of.volume == key.0.volume && of.stay != key.0.stay;
        let mistaken = self.open.keys().find(of_another).filter(|_| broken(Bug::MarksOfAnEarlierStay));
        mistaken.copied().unwrap_or(key)
    }
}

#[cfg(test)]
mod tests {
    use chronicle::StayId;

    use super::*;
    use crate::VolumeId;

    #[test]
    fn a_file_of_another_stay_is_another_file() {
        let mut marks = OpenMarks::default();
        let key = |migration| StayKey { volume: VolumeId([1; 16]), stay: StayId::Arrived(migration) };
        for (stay, epoch, known) in
            [(1, 2, 0), (1, 2, 1), (2, 2, 0), (2, 3, 0), (2, 2, 1), (2, 4, 0), (2, 2, 0)]
        {
            let file = marks.of(key(stay), Epoch(epoch), || Ok::<u32, ()>(0)).unwrap();
            assert_eq!(*file, known, "stay {stay}, epoch {epoch}");
            *file += 1;
        }
        marks.close(key(2), Epoch(2));
        assert_eq!(marks.of(key(2), Epoch(2), || Ok::<u32, ()>(0)), Ok(&mut 0));
    }
}
