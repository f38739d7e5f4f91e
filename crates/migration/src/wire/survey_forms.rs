//! The encoded form of the preflight check.

use serde::{Deserialize, Serialize};

use super::forms::{CodeForm, FormatForm, OfferForm, at_most, cut};
use super::opening::Refusal;
use super::survey::{Survey, Surveyed, SurveyedPlace};
use super::{
    DETAIL_BYTES_MAX, NAME_BYTES_MAX, PLACE_BYTES_MAX, REMARKS_MAX, VM_BYTES_MAX, VOLUMES_MAX, WireError,
};
use crate::identity::VolumeId;

#[derive(Serialize, Deserialize)]
pub(super) struct SurveyForm {
    pub(super) offer: OfferForm,
    held_bytes: Vec<u64>,
    vm: Vec<u8>,
}

#[derive(Serialize, Deserialize)]
pub(super) struct SurveyedForm {
    refusals: Vec<(CodeForm, String)>,
    warnings: Vec<String>,
    places: Vec<PlaceForm>,
    has_hooks: bool,
}

#[derive(Serialize, Deserialize)]
struct PlaceForm {
    volume: [u8; 16],
    store: String,
    place: String,
    format: FormatForm,
    free_bytes: Option<u64>,
    has_replica: bool,
}

impl SurveyForm {
    /// Checks the limits of lists, besides those of the offer.
    pub(super) fn check(&self) -> Result<(), WireError> {
        at_most(self.vm.len(), VM_BYTES_MAX, "bytes of a VM")?;
        match self.held_bytes.len() == self.offer.volume_count() {
            true => Ok(()),
            false => Err(WireError::Malformed),
        }
    }
}

impl SurveyedForm {
    pub(super) fn check(&self) -> Result<(), WireError> {
        at_most(self.refusals.len(), REMARKS_MAX, "refusals")?;
        at_most(self.warnings.len(), REMARKS_MAX, "warnings")?;
        at_most(self.places.len(), VOLUMES_MAX, "volumes")?;
        let texts = self.refusals.iter().map(|(_, detail)| detail).chain(&self.warnings);
        texts
            .into_iter()
            .try_for_each(|text| at_most(text.len(), DETAIL_BYTES_MAX, "bytes of an explanation"))?;
        self.places.iter().try_for_each(|place| {
            at_most(place.store.len(), NAME_BYTES_MAX, "bytes of a name")?;
            at_most(place.place.len(), PLACE_BYTES_MAX, "bytes of a path")
        })
    }
}

impl From<Survey> for SurveyForm {
    fn from(survey: Survey) -> Self {
        let Survey { offer, held_bytes, vm } = survey;
        Self { offer: offer.into(), held_bytes, vm }
    }
}

impl From<SurveyForm> for Survey {
    fn from(form: SurveyForm) -> Self {
        let SurveyForm { offer, held_bytes, vm } = form;
        Self { offer: offer.into(), held_bytes, vm }
    }
}

impl From<Surveyed> for SurveyedForm {
    fn from(surveyed: Surveyed) -> Self {
        let place = |place: SurveyedPlace| PlaceForm {
            volume: place.volume.0,
            store: place.store,
            place: place.place,
            format: place.format.into(),
            free_bytes: place.free_bytes,
            has_replica: place.has_replica,
        };
        let refusals = surveyed.refusals.into_iter().take(REMARKS_MAX);
        Self {
            refusals: refusals.map(|refusal| (refusal.code.into(), cut(refusal.detail))).collect(),
            warnings: surveyed.warnings.into_iter().take(REMARKS_MAX).map(cut).collect(),
            places: surveyed.places.into_iter().map(place).collect(),
            has_hooks: surveyed.has_hooks,
        }
    }
}

impl From<SurveyedForm> for Surveyed {
    fn from(form: SurveyedForm) -> Self {
        let place = |form: PlaceForm| SurveyedPlace {
            volume: VolumeId(form.volume),
            store: words::clean(&form.store),
            place: words::clean(&form.place),
            format: form.format.into(),
            free_bytes: form.free_bytes,
            has_replica: form.has_replica,
        };
        let refusals = form.refusals.into_iter();
        let refusal =
            |(code, detail): (CodeForm, String)| Refusal { code: code.into(), detail: words::clean(&detail) };
        Self {
            refusals: refusals.map(refusal).collect(),
            warnings: words::clean_all(form.warnings),
            places: form.places.into_iter().map(place).collect(),
            has_hooks: form.has_hooks,
        }
    }
}
