//! Tests of grants as administrators and clients change them, across restarts.

use std::path::Path;
use std::sync::Arc;

use api::Role;
use transport::pinned::AccessToken;
use transport::{HostId, Identity};

use super::{Grants, GrantsError, Standing};
use crate::config::folders::Folders;
use crate::config::{Config, Overrides};
use crate::journal::now_unix_ms;

fn grants(data_dir: &Path) -> Arc<Grants> {
    let text = format!("data_dir = '{}'\n[api_tls]\nlisten = '127.0.0.1:7425'\n", data_dir.display());
    let config = Config::parse(Path::new("x"), &text, &Overrides::default(), &Folders::of_this_user());
    Grants::begin(&config.unwrap())
}

fn order(name: &str, role: Role, key: Option<HostId>) -> api::NewGrant {
    api::NewGrant { name: name.to_owned(), role, key: key.map(|key| key.to_string()), lifetime_s: 60 }
}

fn standing(grants: &Grants, key: HostId) -> Option<Standing> {
    grants.who(key).map(|granted| granted.standing)
}

#[test]
fn an_invitation_is_redeemed_once_by_whoever_has_it_and_in_its_time() {
    let folder = tempfile::tempdir().unwrap();
    let list = grants(folder.path());
    let now = now_unix_ms();
    let made = list.grant(order("a", Role::Operate, None), now).unwrap();
    assert_eq!((made.grant.key, made.grant.role), (None, Role::Operate));
    let token: AccessToken = made.token.unwrap().parse().unwrap();
    assert_eq!(Some(token.server.to_string()), list.describe().unwrap().key);
    let invited = token.identity().unwrap().id();
    let own = HostId([9; 32]);
    // It outlives the daemon.
    let list = grants(folder.path());
    assert_eq!(standing(&list, invited), Some(Standing::Invited));
    assert!(matches!(list.redeem(own, &own.to_string(), now), Err(GrantsError::NotInvited)));
    assert!(matches!(list.redeem(invited, "x", now), Err(GrantsError::Key)));
    assert!(matches!(list.redeem(invited, &own.to_string(), now + 60_000), Err(GrantsError::NotInvited)));
    assert_eq!(list.redeem(invited, &own.to_string(), now + 59_999).unwrap().key, Some(own.to_string()));
    assert_eq!((standing(&list, invited), standing(&list, own)), (None, Some(Standing::Has(Role::Operate))));
    let again = list.redeem(invited, &HostId([8; 32]).to_string(), now);
    assert!(matches!(again, Err(GrantsError::NotInvited)));
    // A client's own key is no access token.
    assert!(matches!(list.redeem(own, &HostId([8; 32]).to_string(), now), Err(GrantsError::NotInvited)));
}

#[test]
fn an_invitation_whose_time_is_over_lets_nobody_in_and_takes_no_name() {
    let folder = tempfile::tempdir().unwrap();
    let list = grants(folder.path());
    let long_ago = now_unix_ms() - 3_600_000;
    let made = list.grant(order("a", Role::Admin, None), long_ago).unwrap();
    let token: AccessToken = made.token.unwrap().parse().unwrap();
    assert_eq!(standing(&list, token.identity().unwrap().id()), None);
    list.grant(order("a", Role::Read, None), now_unix_ms()).unwrap();
    assert_eq!(list.describe().unwrap().grants.len(), 1);
}

#[test]
fn keys_have_roles_that_change_and_end_and_nobody_has_the_name_or_key_of_another() {
    let folder = tempfile::tempdir().unwrap();
    let list = grants(folder.path());
    let (now, [one, other]) = (now_unix_ms(), [1, 2].map(|byte| HostId([byte; 32])));
    list.grant(order("a", Role::Read, Some(one)), now).unwrap();
    for (name, key) in [("a", other), ("b", one)] {
        assert!(matches!(list.grant(order(name, Role::Admin, Some(key)), now), Err(GrantsError::Exists(_))));
    }
    assert!(matches!(list.grant(order("a b", Role::Read, Some(other)), now), Err(GrantsError::Name(_))));
    assert_eq!(list.set("a", Role::Admin).unwrap().role, Role::Admin);
    assert_eq!(standing(&list, one), Some(Standing::Has(Role::Admin)));
    assert!(matches!(list.set("b", Role::Read), Err(GrantsError::NotFound(_))));
    // A client with an access token cannot claim another client's key.
    let token = list.grant(order("c", Role::Read, None), now).unwrap().token.unwrap();
    let invited = token.parse::<AccessToken>().unwrap().identity().unwrap().id();
    assert!(matches!(list.redeem(invited, &one.to_string(), now), Err(GrantsError::Exists(_))));
    list.revoke("a").unwrap();
    assert_eq!(standing(&list, one), None);
    assert_eq!(standing(&grants(folder.path()), one), None, "also after a restart");
}

#[test]
fn a_list_that_is_changed_by_hand_holds_once_it_is_read_again_and_a_broken_one_does_not() {
    let folder = tempfile::tempdir().unwrap();
    let list = grants(folder.path());
    let key = HostId([1; 32]);
    list.grant(order("a", Role::Read, Some(key)), now_unix_ms()).unwrap();
    let file = folder.path().join("access.json");
    let text = std::fs::read_to_string(&file).unwrap();
    std::fs::write(&file, text.replace("read", "admin")).unwrap();
    assert_eq!(standing(&list, key), Some(Standing::Has(Role::Read)));
    list.reload();
    assert_eq!(standing(&list, key), Some(Standing::Has(Role::Admin)));
    std::fs::write(&file, "{").unwrap();
    list.reload();
    assert_eq!(standing(&list, key), Some(Standing::Has(Role::Admin)));
    // A daemon that begins with a broken list admits no client, and says so.
    let broken = grants(folder.path());
    assert_eq!(standing(&broken, key), None);
    assert!(broken.describe().unwrap().problem.unwrap().contains("access.json"));
}

#[test]
fn there_are_no_more_grants_than_can_be_looked_through() {
    let folder = tempfile::tempdir().unwrap();
    let list = grants(folder.path());
    let key = |number: usize| HostId::of_public_key(&number.to_le_bytes());
    let grant = |number: usize| list.grant(order(&format!("n{number}"), Role::Read, Some(key(number))), 0);
    (0..super::GRANTS_MAX).for_each(|number| drop(grant(number).unwrap()));
    assert!(matches!(grant(super::GRANTS_MAX), Err(GrantsError::TooMany)));
}

#[test]
fn a_daemon_that_does_not_listen_grants_nothing_and_has_no_key() {
    let folder = tempfile::tempdir().unwrap();
    let text = format!("data_dir = '{}'\n", folder.path().display());
    let config = Config::parse(Path::new("x"), &text, &Overrides::default(), &Folders::of_this_user());
    let list = Grants::begin(&config.unwrap());
    let refused = list.grant(order("a", Role::Read, None), 0);
    assert!(matches!(refused, Err(GrantsError::NotListening)));
    assert!(list.acceptor().is_none() && !folder.path().join("api").exists());
}

#[test]
fn a_daemon_whose_key_is_gone_makes_no_other() {
    let folder = tempfile::tempdir().unwrap();
    let key = grants(folder.path()).describe().unwrap().key;
    assert_eq!(grants(folder.path()).describe().unwrap().key, key, "it keeps it");
    std::fs::remove_file(folder.path().join("api/key.pem")).unwrap();
    let list = grants(folder.path());
    assert!(list.acceptor().is_none() && list.describe().unwrap().problem.is_some());
    assert!(Identity::load(&folder.path().join("api")).is_err());
}
